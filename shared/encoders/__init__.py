"""The computation of text encoders: attention, packed documents, padding and the masked head.

May import: models and below.
"""
