"""Cropping, resizing, augmentation and normalization of image batches on the device; stochastic depth and repeats."""
