"""Texts as tokens: tokenizers, token files, padding, masking.

May import: datasets and below.
"""
