"""The settings of recipes, and the flags and YAML files that set them."""
