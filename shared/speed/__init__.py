"""Faster computation of a model with the same results: one token of the last layer, bf16 activations, compiled layers.

Each replacement in a model of transformers is checked at the start.
"""
