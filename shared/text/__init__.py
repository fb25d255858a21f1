"""Tokenized text: tokenizers, token files, padding and masking.

May import: datasets and below.
"""
