"""Saving and resuming: a checkpoint is complete or absent."""
