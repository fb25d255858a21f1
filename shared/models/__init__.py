"""New and pretrained models, adapted to the task and the device.

May import: augmentation, text and below.
"""
