"""Helpers for tests of error messages and of output files."""

import csv
import hashlib


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
