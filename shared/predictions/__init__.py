"""Predictions of a trained model for a file: what each kind of model predicts, parts that survive a kill, output files."""
