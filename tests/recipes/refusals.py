"""Helpers for tests of error messages and of output files."""

import csv
import hashlib

import pytest

from shared.errors import UserError
from shared.processes import folder_lock


def refusal(train, output, *flags):
    """The one-line error with which a recipe refuses these flags."""
    with pytest.raises(UserError) as caught:
        train(output, *flags)
    folder_lock.release_all()  # as the end of the process would
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def files(folder):
    """{path: (digest, time of the last change)} of every file in a folder."""
    return {
        path.relative_to(folder): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def rows(path, *lines):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *lines])
    return path
