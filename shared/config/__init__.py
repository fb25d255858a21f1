"""Settings of a recipe, and the flags and YAML files that set them.

May import: no other room.
"""
