"""Predictions of a trained model for a file: those of each kind of model, parts that survive a kill, output files."""
