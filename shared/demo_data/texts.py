"""The default texts: docstrings of installed libraries, labeled by library.

`load` returns classification data (train, validation); `documents` returns all texts, for masked language modeling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shared.demo_data import libraries

if TYPE_CHECKING:
    import pyarrow as pa

TEXTS_PER_LIBRARY = 2000
MIN_CHARACTERS = 80  # shorter texts are mostly single sentences that fit any library ("Return a copy.")


def load() -> tuple[pa.Table, pa.Table]:
    """Training and validation tables with the string columns text, label (the library) and file.

    The rows are in a fixed random order, with at most TEXTS_PER_LIBRARY texts per label. All texts of a source file are
    in the same table.

    Raises:
        UserError: one of the libraries is not installed.
    """
    table = libraries.cached_table("docstrings", gather)
    seen: Counter[str] = Counter()
    kept = []
    for label in table["label"].to_pylist():
        seen[label] += 1
        kept.append(seen[label] <= TEXTS_PER_LIBRARY)
    return libraries.in_splits(table.filter(kept))


def documents() -> pa.Table:
    """All texts, without the limit per library: the columns text, file and split ("train" or "validation")."""
    return libraries.cached_table("docstrings", gather).drop_columns(["label"])


def gather(roots: Mapping[str, Path]) -> list[dict[str, str]]:
    """The docstrings in each library's source folder: rows of text, label, file and split, in a fixed random order.

    Texts that differ only in white space are duplicates: one of them is kept, or none if two libraries contain it.
    """
    found: dict[str, tuple[str, str]] = {}  # text with single spaces: (text, file)
    ambiguous = set()
    for file, texts in libraries.parsed(roots, docstrings, libraries.FILES_PER_LIBRARY):
        for text in texts:
            key = " ".join(text.split())
            if len(key) >= MIN_CHARACTERS and _label(found.setdefault(key, (text, file))[1]) != _label(file):
                ambiguous.add(key)

    # Sorted by a hash of the text, so the first n rows are a random sample for any n; `load` relies on this.
    keys = sorted(found.keys() - ambiguous, key=lambda key: (libraries.uniform_hash("order", key), key))
    rows = (found[key] for key in keys)
    return [{"text": t, "label": _label(f), "file": f, "split": libraries.split_of(f)} for t, f in rows]


def docstrings(source: bytes) -> list[str]:
    """The cleaned docstrings of a Python file, its classes and functions, in any order; [] if it cannot be parsed."""
    return [libraries.docstring_of(node) for node in libraries.definitions(source, in_functions=True)]


def _label(file: str) -> str:
    return file.partition("/")[0]
