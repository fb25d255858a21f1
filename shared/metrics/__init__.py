"""Metrics of classification and regression: the shipped ones, files of the user, and the Hub."""
