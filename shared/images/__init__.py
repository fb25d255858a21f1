"""Images on disk: folders of classes, image columns of tables, decoding, the cache of decoded pixels.

May import: datasets and below.
"""
