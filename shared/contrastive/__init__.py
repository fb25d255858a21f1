"""Sentence embeddings: tuples of texts, pooling, the ranking loss and its cached gradients, retrieval scores."""
