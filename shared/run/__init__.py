"""A run from its start to its exported model.

May import: every other room.
"""
