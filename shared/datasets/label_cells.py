"""The cells of label columns: the labels of each row as texts."""

import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.cache.prepared import key_digest, text_once
from shared.compat.of_datasets import class_names
from shared.datasets.label_columns import FLAG
from shared.datasets.readers import is_list
from shared.datasets.rows import blocks_of, column_of, content_of, reading_in, refuse_missing

FORMAT = 1  # part of the cache's names: increase it when the labels found in the same rows change
ZERO_ONE = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}  # for one label, in lower case


def cells_of(block: pa.Table, column: str, delimiter: str | None = None) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The different labels in the rows of a block; for each label [n] its place among them; its row, ascending.

    With a delimiter no label can be missing: a row with an empty text has no labels.

    Raises:
        UserError: a label is missing.
    """
    cells, rows = column_of(block, column, FLAG).combine_chunks(), np.arange(block.num_rows)
    if delimiter is not None:
        cells = _split(cells, delimiter)
    if is_list(cells.type):
        refuse_missing(block, column, cells.is_null())
        rows = np.repeat(rows, np.asarray(pc.list_value_length(cells)))
        cells = cells.flatten()
    encoded = cells.dictionary_encode("encode")
    texts, places = [*map(text_of, encoded.dictionary.to_pylist())], np.asarray(encoded.indices, np.int64)
    gaps = {"", "-1"} if class_names(block, column) else {""}  # on the Hub, -1 is a label that is not published
    refuse_missing(block, column, np.array([text.strip() in gaps for text in texts], bool)[places], rows)
    return texts, places, rows


def _split(cells: pa.Array, delimiter: str) -> pa.Array:
    """The labels in texts with a delimiter: lists of texts [N]."""
    encoded = cells.dictionary_encode("encode")
    parts = (map(str.strip, text_of(cell).split(delimiter)) for cell in encoded.dictionary.to_pylist())
    return pa.array([[*filter(None, labels)] for labels in parts], pa.list_(pa.string())).take(encoded.indices)


def labels_in(table: pa.Table, column: str, delimiter: str | None) -> tuple[dict[str, int], int, int]:
    """The first row with each label of a column, in order; the least and the largest number of labels of a row.

    The first process of a machine reads a memory-mapped table, once.

    Raises:
        UserError: a label is missing.
    """

    def find() -> str:
        first_rows: dict[str, int] = {}
        start = 0
        sizes: set[int] = set()
        for block in blocks_of(table):
            texts, places, rows = cells_of(block, column, delimiter)
            first = np.empty(len(texts), np.int64)
            first[places[::-1]] = rows[::-1]  # of the rows with the same label, the one that is written last stays
            for text, row in zip(texts, first.tolist(), strict=True):
                first_rows.setdefault(text, start + row)
            sizes |= {*np.unique(np.bincount(rows, minlength=block.num_rows)).tolist()}
            start += block.num_rows
        return json.dumps([first_rows, min(sizes, default=0), max(sizes, default=0)])

    content = content_of(table)
    name = content and f"labels-{key_digest(FORMAT, content, column, reading_in(table, column), delimiter)}"
    first_rows, least, most = json.loads(text_once(name, "labels.json", find))
    return first_rows, least, most


def text_of(cell: Any) -> str:
    """A label as text; "" for null and NaN. Whole floats become integers: some programs store integers like that."""
    if cell is None or cell != cell:  # noqa: PLR0124
        return ""
    if isinstance(cell, bool):
        return str(cell).lower()
    if isinstance(cell, float | Decimal) and float(cell).is_integer() and abs(float(cell)) < 2**53:
        cell = int(cell)
    return str(cell)


def marks_of(labels: Sequence[str]) -> list[int]:
    """The 0 or 1 that each text means, and -1 for another text."""
    return [ZERO_ONE.get(label.strip().lower(), -1) for label in labels]
