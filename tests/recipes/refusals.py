"""Check the errors of a recipe and the outputs of a run, for tests."""

import csv
import hashlib

import pytest

from shared.errors import UserError
from shared.processes import folder_lock


def refusal(train, output, *flags):
    """The one line with which a recipe refuses these flags."""
    with pytest.raises(UserError) as caught:
        train(output, *flags)
    folder_lock.release_all()  # the end of the process would do that
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def files(folder):
    """Every file's digest and time."""
    return {
        path.relative_to(folder): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def rows(path, *lines):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *lines])
    return path
