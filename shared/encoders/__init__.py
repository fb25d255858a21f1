"""How a text encoder computes: attention, packed documents, padding, the masked head.

May import: models and below.
"""
