"""Helpers of the tests of predictions: predict a file, and the messages of errors."""

import pytest

from shared import predict
from shared.errors import UserError
from shared.processes import folder_lock


def predict_file(*words):
    """The scores of `python -m shared.predict` with these words."""
    return predict.predict(predict.parse([str(word) for word in words]))


def message_of(function, *words):
    """The one-line UserError that a call raises."""
    with pytest.raises(UserError) as caught:
        function(*words)
    folder_lock.release_all()  # as the end of the process would
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message
