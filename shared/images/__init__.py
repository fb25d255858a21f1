"""Images: folders of classes, image columns of tables, decoding, the cache of decoded pixels, and image classifiers."""
