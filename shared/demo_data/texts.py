"""The default texts: docstrings of installed libraries, labeled by library.

`load` returns classification data (train, validation); `documents` returns all texts, for masked language modeling.
"""

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from shared.demo_data import libraries
from shared.demo_data.libraries import in_validation, sample_files, uniform_hash

if TYPE_CHECKING:  # the processes that parse files import this module and do not need pyarrow
    import pyarrow as pa

FORMAT = 1  # part of the cache's name: increase it when a change below changes the data
TEXTS_PER_LIBRARY = 2000
MIN_CHARACTERS = 80  # shorter texts are mostly single sentences that fit any library ("Return a copy.")


def load() -> "tuple[pa.Table, pa.Table]":
    """Training and validation tables with the string columns text, label (the library) and file.

    The rows are in a fixed random order, with at most TEXTS_PER_LIBRARY texts per label. All texts of a source file are
    in the same table.

    Raises:
        UserError: too few of the libraries are installed.
    """
    tables = _tables()
    return tables["train"], tables["validation"]


def documents() -> "pa.Table":
    """All texts, without the limit per library: the columns text, file and split ("train" or "validation")."""
    return _tables()["documents"]


def _tables() -> "dict[str, pa.Table]":
    roots, versions = libraries.required()
    return libraries.cached_tables("docstrings", FORMAT, "docstrings", versions, lambda: _parts(gather(roots)))


def gather(roots: Mapping[str, Path]) -> "pa.Table":
    """The docstrings in each library's source folder: columns text, label, file and split, in a fixed random order.

    Texts that differ only in white space are duplicates: one of them is kept, or none if two libraries contain it.
    """
    import pyarrow as pa
    from tqdm import tqdm

    files = {name: path for label, root in roots.items() for name, path in sample_files(label, root)}
    found: dict[str, tuple[str, str]] = {}  # text with single spaces: (text, file)
    ambiguous = set()
    with tqdm(total=len(files), desc="reading sources", unit="file") as bar:
        found_in_files = libraries.parse_in_processes(list(files.values()), docstrings)
        for file, texts in zip(files, found_in_files, strict=True):
            for text in texts:
                key = " ".join(text.split())
                if len(key) >= MIN_CHARACTERS and _label(found.setdefault(key, (text, file))[1]) != _label(file):
                    ambiguous.add(key)
            bar.update()

    # Sorted by a hash of the text, so the first n rows are a random sample for any n; `_parts` relies on this.
    keys = sorted(found.keys() - ambiguous, key=lambda key: (uniform_hash("order", key), key))
    rows = [found[key] for key in keys]
    return pa.table(
        {
            "text": [text for text, _ in rows],
            "label": [_label(file) for _, file in rows],
            "file": [file for _, file in rows],
            "split": ["validation" if in_validation(file) else "train" for _, file in rows],
        }
    )


def docstrings(source: bytes) -> list[str]:
    """The cleaned docstrings of a Python file, its classes and functions, in any order; [] if it cannot be parsed."""
    try:
        pending: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):  # code for a newer Python, or null bytes (a ValueError up to Python 3.11)
        return []
    texts = []
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            texts.append(text.encode(errors="ignore").decode())  # drops lone surrogates, which UTF-8 cannot encode
        for block in ("body", "orelse", "handlers", "finalbody"):  # unlike ast.walk, skips the many expressions
            pending.extend(getattr(node, block, ()))
    return texts


def _label(file: str) -> str:
    return file.partition("/")[0]


def _parts(table: "pa.Table") -> "dict[str, pa.Table]":
    """The tables of the data; for classification, with the first TEXTS_PER_LIBRARY texts of each library."""
    seen: dict[str, int] = {}
    kept = []
    for label in table["label"].to_pylist():
        seen[label] = seen.get(label, 0) + 1
        kept.append(seen[label] <= TEXTS_PER_LIBRARY)
    return {"documents": table.select(["text", "file", "split"]), **libraries.in_splits(table.filter(kept))}
