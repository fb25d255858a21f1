"""Helper for tests of error messages."""

import pytest

from shared.errors import UserError
from shared.processes import folder_lock


def message_of(function, *words):
    """The one-line UserError that a call raises."""
    with pytest.raises(UserError) as caught:
        function(*words)
    folder_lock.release_all()  # as the end of the process would
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message
