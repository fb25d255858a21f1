"""Images on disk: class folders and columns, decoding, the cache of pixels.

May import: datasets and below.
"""
