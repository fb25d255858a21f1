"""What is done to images on the device, in training and in evaluation.

May import: images and below.
"""
