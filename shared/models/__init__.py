"""Models made to fit a task and a device, new or pretrained, of text and of images.

May import: augmentation, text and below.
"""
