"""Tagging of words: readers of tagged texts, tag schemes, pieces and windows, scores, and the embedded data."""
