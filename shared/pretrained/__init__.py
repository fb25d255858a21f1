"""Models and tokenizers of the Hub or of a local folder.

May import: config.
"""
