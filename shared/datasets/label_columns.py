"""Label columns of all tasks: numbers to predict, the labels of each row as texts, and the names of ClassLabels."""

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.cache.prepared import arrays_writer, build_once, key_digest, read_array, text_once
from shared.compat import of_datasets
from shared.datasets.rows import (
    blocks_of,
    column_of,
    content_of,
    decided,
    is_text,
    reading_in,
    refuse_missing,
    source_of,
    where,
)
from shared.errors import UserError

Kind = Literal["classification", "multi_label", "regression"]

FLAG = "--label_column_name"
FORMAT = 1  # part of the cache's names: increase it when the numbers or labels of the same rows change
BLOCK = 1 << 20  # numbers of a memory-mapped array that are read at once
FINEST = 100  # fewest float32 steps per standard deviation that an exported model needs
TOO_MANY = "too many for classes: use another column, or --problem_type regression if the labels are numbers"
MOST_DISTINCT = 1 << 20  # different labels of a table
ZERO_ONE = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}  # for one label, in lower case
NEEDS: dict[Kind, str] = {
    "classification": "one label",
    "multi_label": "a list of labels, several columns or --label_delimiter",
    "regression": "one number",
}


def numbers_in(table: pa.Table, column: str) -> np.ndarray:
    """float64 [N]; those of a memory-mapped table are memory-mapped.

    Raises:
        UserError: the column does not exist or does not contain numbers, or see `numbers_of`.
    """
    table = decided(table, column, "regression")
    empty = table.slice(0, 0)
    if not is_number(type_ := column_of(empty, column, FLAG).type):
        raise UserError(f"{FLAG} {column}: {source_of(table)} contains {type_}, not numbers")
    blocks = (numbers_of(block, column) for block in chain([empty], blocks_of(table)))
    return array_of_blocks(table, blocks, FORMAT, column, reading_in(table, column))


def is_list(type_: pa.DataType) -> bool:
    """Whether an Arrow type is a list."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def is_number(type_: pa.DataType) -> bool:
    """Whether an Arrow type is that of numbers, or of nothing but gaps."""
    return is_fraction(type_) or bool(pa.types.is_integer(type_) or pa.types.is_null(type_))


def is_fraction(type_: pa.DataType) -> bool:
    """Whether an Arrow type is that of numbers with a fractional part."""
    return bool(pa.types.is_floating(type_) or pa.types.is_decimal(type_))


def numbers_of(table: pa.Table, column: str) -> np.ndarray:
    """float64 [N]; UserError for a number that is missing, or not finite in float32, the type of the model's output."""
    cells = column_of(table, column, FLAG).cast(pa.float64())
    refuse_missing(table, column, cells.is_null(nan_is_null=True))
    numbers = cells.to_numpy()
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused
        finite = np.isfinite(numbers.astype(np.float32))
    if len(infinite := np.flatnonzero(~finite)):
        row = int(infinite[0])
        raise UserError(f"{where(table, row)} has {cells[row]} in {column}, not finite in float32: correct the row")
    return numbers


def refuse_outliers(table: pa.Table, column: str, numbers: np.ndarray) -> None:
    """Refuse a number beside which float32 cannot distinguish the others, except up to 1 % at each end.

    Standardized together, the others would all become the same target. `numbers` [N] may be memory-mapped.

    Raises:
        UserError: names the row of the largest such number.
    """
    row = max(int(numbers.argmin()), int(numbers.argmax()), key=lambda row: abs(numbers[row]))
    some = numbers[:: len(numbers) // BLOCK + 1]
    (low, usual), high = np.percentile(some, [1, 50], method="higher"), np.percentile(some, 99, method="lower")
    step = float(np.spacing(np.float32(abs(numbers[row]))))
    if 0 < high - low <= FINEST * step <= abs(numbers[row] - usual):
        raise UserError(
            f"{where(table, row)} has {numbers[row]:g} in {column}, where most rows have about {usual:.4g}: float32, "
            f"the dtype of a model's outputs, has steps of {step:.2g} there, so it cannot distinguish the others: "
            "correct the row, or give the logarithms of the column"
        )


def array_of_blocks(table: pa.Table, blocks: Iterator[np.ndarray], *key: object) -> np.ndarray:
    """The concatenation of `blocks`, arrays that are made of the blocks of a table.

    That of a memory-mapped table is memory-mapped, too: it is written once per machine. `key` is what `blocks` depend
    on besides the rows.
    """
    if not (content := content_of(table)):
        return np.concatenate([*blocks])

    def build(folder: Path) -> None:
        with arrays_writer(folder, {}) as append:
            for block in blocks:
                append({"targets": block})

    return read_array(build_once(f"targets-{key_digest(content, *key)}", build) / "targets.npy")


def class_names(table: pa.Table, column: str) -> tuple[str, ...]:
    """The names that `datasets` stores in the metadata of a column of ClassLabels or lists of them; otherwise ()."""
    type_ = table.schema.field(column).type
    if not pa.types.is_integer(getattr(type_, "value_type", type_)):
        return ()
    feature = of_datasets.feature(table, column)
    feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)  # three ways to write a list
    if not of_datasets.is_class_label(feature):
        return ()
    return tuple(feature.get("names") or map(str, range(feature.get("num_classes") or 0)))


def names_of_ids(
    table: pa.Table, column: str, ids: np.ndarray, rows: np.ndarray, classes: tuple[str, ...], what: str = ""
) -> pa.Array:
    """The names of ClassLabel ids [n] in these rows [n]; UserError for an id without a name."""
    if len(nameless := np.flatnonzero((ids < 0) | (ids >= len(classes)))):
        found = f"{where(table, int(rows[nameless[0]]))} has {what}{ids[nameless[0]]} in {column}"
        raise UserError(f"{found}, but its ClassLabel has names for 0 to {len(classes) - 1} only: correct the row")
    return pa.array(classes).take(pa.array(ids))


def kind_of_column(type_: pa.DataType, wanted: Kind | None, source: str) -> Kind:
    """The kind of labels in a column of this type, or `wanted`; UserError if the type does not fit that."""
    a_list = is_list(type_)
    cell = type_.value_type if a_list else type_
    numeric = is_number(cell)
    if not (numeric or is_text(cell) or pa.types.is_boolean(cell)):
        raise UserError(f"{source} contains {type_}: labels are strings, numbers, booleans, or lists of them")
    kind = wanted or ("multi_label" if a_list else "regression" if is_fraction(cell) else "classification")
    if a_list != (kind == "multi_label") or (kind == "regression" and not numeric):
        raise UserError(f"{source} contains {type_}, but {kind} needs {NEEDS[kind]} for each row: see --problem_type")
    return kind


class Cells(NamedTuple):
    """The labels of some rows, one after the other."""

    texts: list[str]  # the different labels
    places: np.ndarray  # int64 [n], of each label in `texts`
    rows: np.ndarray  # int64 [n], the row of each label, ascending


class Found(NamedTuple):
    """The labels of a table."""

    first_rows: dict[str, int]  # the first row with each label, in order
    least: int  # number of labels of a row
    most: int


def cells_of(block: pa.Table, columns: Sequence[str], delimiter: str | None = None) -> Cells:
    """The labels of the rows of a block; with several columns, the cell of each. UserError for a missing label.

    With a delimiter no label can be missing: a row with an empty text has no labels.
    """
    texts: list[str] = []
    places = []
    rows = np.arange(block.num_rows)
    for name in columns:
        cells = column_of(block, name, FLAG).combine_chunks()
        if delimiter is not None:
            cells = _split(cells, delimiter)
        if is_list(cells.type):
            refuse_missing(block, name, cells.is_null())
            rows = np.repeat(rows, np.asarray(pc.list_value_length(cells)))
            cells = cells.flatten()
        encoded = cells.dictionary_encode("encode")
        found = [*map(text_of, encoded.dictionary.to_pylist())]
        gaps = {"", "-1"} if class_names(block, name) else {""}  # on the Hub, -1 is a label that is not published
        refuse_missing(block, name, np.array([text.strip() in gaps for text in found], bool)[encoded.indices], rows)
        places.append(np.asarray(encoded.indices, np.int64) + len(texts))
        texts += found
    return Cells(texts, np.stack(places, axis=1).ravel(), np.repeat(rows, len(columns)))


def _split(cells: pa.Array, delimiter: str) -> pa.Array:
    """The labels in texts with a delimiter: lists of texts [N]."""
    encoded = cells.dictionary_encode("encode")
    parts = (map(str.strip, text_of(cell).split(delimiter)) for cell in encoded.dictionary.to_pylist())
    return pa.array([[*filter(None, labels)] for labels in parts], pa.list_(pa.string())).take(encoded.indices)


def labels_in(table: pa.Table, column: str, delimiter: str | None) -> Found:
    """The labels in a column. The first process of a machine reads a memory-mapped table, once.

    Raises:
        UserError: a label is missing, or there are too many different ones.
    """

    def find() -> str:
        first_rows: dict[str, int] = {}
        start = 0
        sizes: set[int] = set()
        for block in blocks_of(table):
            texts, places, rows = cells_of(block, [column], delimiter)
            first = np.empty(len(texts), np.int64)
            first[places[::-1]] = rows[::-1]  # of the rows with the same label, the one that is written last stays
            for text, row in zip(texts, first.tolist(), strict=True):
                first_rows.setdefault(text, start + row)
            if len(first_rows) > MOST_DISTINCT:
                found = f"more than {MOST_DISTINCT:,} different values in {column}"
                raise UserError(f"{source_of(table)} has {found}, {TOO_MANY}")
            sizes |= {*np.unique(np.bincount(rows, minlength=block.num_rows)).tolist()}
            start += block.num_rows
        return json.dumps([first_rows, min(sizes, default=0), max(sizes, default=0)])

    content = content_of(table)
    key = key_digest(FORMAT, content, column, reading_in(table, column), delimiter)
    return Found(*json.loads(text_once(f"labels-{key}", "labels.json", find) if content else find()))


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
