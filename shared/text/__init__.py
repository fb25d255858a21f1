"""Tokenized text: tokenizers, token files, padding and masking."""
