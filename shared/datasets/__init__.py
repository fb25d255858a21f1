"""Rows and their labels, read from files, saved data sets, the Hub or the demo texts."""
