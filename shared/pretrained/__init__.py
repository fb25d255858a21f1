"""Pretrained models and tokenizers from the Hub or a local folder."""
