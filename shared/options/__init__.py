"""The settings of recipes in addition to those of all runs: extras, data, texts, and images."""
