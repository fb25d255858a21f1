"""Sentence embeddings: tuples of texts, pooling, losses of a batch and their cached gradients, retrieval scores."""
