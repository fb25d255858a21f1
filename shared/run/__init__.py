"""A run from its start to its exported model."""
