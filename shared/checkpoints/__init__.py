"""Saving and resuming: a checkpoint is complete or absent.

May import: optimization and below.
"""
