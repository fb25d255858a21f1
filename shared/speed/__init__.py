"""Faster computation of a model with the same results. Each replacement in a model is checked at the start."""
