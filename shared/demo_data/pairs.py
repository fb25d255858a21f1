"""The default pairs of texts: a function's docstring, and its source without the docstring."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shared.demo_data import libraries

if TYPE_CHECKING:
    import pyarrow as pa

COPIES = "transformers"  # is left out: its files repeat each other's functions
PAIRS_PER_LIBRARY = 2000
MIN_CHARACTERS = 80  # of both texts of a pair


def load() -> tuple[pa.Table, pa.Table]:
    """Training and validation tables with the string columns anchor (docstring), positive (source) and file.

    The rows are in a fixed random order. All functions of a source file are in the same table, and no text occurs
    twice.

    Raises:
        UserError: one of the libraries is not installed.
    """
    return libraries.in_splits(libraries.cached_table("functions", gather, without=COPIES))


def gather(roots: Mapping[str, Path]) -> list[dict[str, str]]:
    """The functions in each library's source folder: rows of anchor, positive, file and split.

    Of the pairs that share a docstring or a source, up to white space, one is kept.
    """
    found = [
        (libraries.uniform_hash("order", anchor), file, anchor, source)
        for file, pairs in libraries.parsed(roots, functions, libraries.FILES_PER_LIBRARY)
        for anchor, source in pairs
    ]
    rows = []
    seen: set[str] = set()
    per_library: Counter[str] = Counter()
    for _, file, *pair in sorted(found):
        keys = [" ".join(text.split()) for text in pair]
        library = file.partition("/")[0]
        if min(map(len, keys)) < MIN_CHARACTERS or not seen.isdisjoint(keys):
            continue
        if per_library[library] < PAIRS_PER_LIBRARY:
            per_library[library] += 1
            seen.update(keys)
            rows.append({"anchor": pair[0], "positive": pair[1], "file": file, "split": libraries.split_of(file)})
    return rows


def functions(source: bytes) -> list[tuple[str, str]]:
    """(docstring, source without it) of the functions and methods in a Python file; [] if it cannot be parsed.

    Functions inside other functions are left out, because their docstring is part of the source of the outer one.
    """
    lines = [line.decode(errors="ignore") for line in re.split(rb"\r\n|\r|\n", source)]
    found = []
    for node in libraries.definitions(source, in_functions=False):
        text = libraries.docstring_of(node)
        if text and isinstance(node, libraries.Function) and len(node.body) > 1:
            first = node.body[0]
            if first.lineno > node.lineno:
                code = [*lines[node.lineno - 1 : first.lineno - 1], *lines[first.end_lineno : node.end_lineno]]
                found.append((text, textwrap.dedent("\n".join(code))))
    return found
