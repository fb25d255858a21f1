"""Helpers of the tests of predictions: predict a file, and the messages of errors."""

from shared import predict


def predict_file(*words):
    """The scores of `python -m shared.predict` with these words."""
    return predict.predict(predict.parse([str(word) for word in words]))
