"""Predict a file, and read predictions, for tests."""

import csv

from shared import predict


def predict_file(*words):
    """The scores of `python -m shared.predict` with these words."""
    return predict.predict(predict.parse([str(word) for word in words]))


def read_csv(path):
    """The rows of a CSV file as {column: text}."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
