"""Label columns of all tasks: labels as texts, numbers to predict, ClassLabels, and arrays of what the rows contain."""

import json
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.cache.prepared import build_once, key_digest, read_array, text_once, write_arrays
from shared.compat.of_datasets import class_names
from shared.datasets.readers import is_list
from shared.datasets.rows import blocks_of, column_of, content_of, decided, reading_in, refuse_missing, source_of, where
from shared.errors import UserError

FLAG = "--label_column_name"
FORMAT = 1  # part of the cache's names: increase it when the labels or numbers in the same rows change
BLOCK = 1 << 20  # numbers of a memory-mapped array that are read at once
FINEST = 100  # fewest float32 steps per standard deviation that an exported model needs
ZERO_ONE = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}  # for one label, in lower case


def numbers_in(table: pa.Table, column: str) -> np.ndarray:
    """float64 [N]; those of a memory-mapped table are memory-mapped.

    Raises:
        UserError: the column does not exist or does not contain numbers, or one is missing or not finite in float32.
    """
    table = decided(table, column, "regression")
    empty = table.slice(0, 0)
    if not is_number(type_ := column_of(empty, column, FLAG).type):
        raise UserError(f"{FLAG} {column}: {source_of(table)} contains {type_}, not numbers")
    blocks = (_numbers_of(block, column) for block in chain([empty], blocks_of(table)))
    return array_of_blocks(table, blocks, FORMAT, column, reading_in(table, column))


def is_number(type_: pa.DataType) -> bool:
    """Whether an Arrow type is that of numbers, or of nothing but gaps."""
    return is_fraction(type_) or bool(
        pa.types.is_integer(type_) or pa.types.is_decimal(type_) or pa.types.is_null(type_)
    )


def is_fraction(type_: pa.DataType) -> bool:
    """Whether an Arrow type is that of numbers with a fractional part."""
    return bool(pa.types.is_floating(type_) or (pa.types.is_decimal(type_) and type_.scale > 0))


def _numbers_of(table: pa.Table, column: str) -> np.ndarray:
    """float64 [N]; float32 is the type of the model's output."""
    cells = column_of(table, column, FLAG).cast(pa.float64())
    refuse_missing(table, column, cells.is_null(nan_is_null=True))
    numbers = cells.to_numpy()
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused
        finite = np.isfinite(numbers.astype(np.float32))
    if len(infinite := np.flatnonzero(~finite)):
        row = int(infinite[0])
        raise UserError(f"{where(table, row)} has {cells[row]} in {column}, not finite in float32: correct the row")
    return numbers


def refuse_equal(table: pa.Table, column: str, numbers: np.ndarray) -> None:
    """Raise UserError if there are several numbers [N], and all are the same."""
    if len(numbers) > 1 and numbers.min() == numbers.max():
        raise UserError(f"{FLAG} {column}: every row of {source_of(table)} has {numbers[0]}: add other rows")


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
    arrays = ({"targets": block} for block in blocks)
    folder = build_once(f"targets-{key_digest(content, *key)}", lambda folder: write_arrays(folder, arrays))
    return read_array(folder / "targets.npy")


def names_of_ids(
    table: pa.Table, column: str, ids: np.ndarray, rows: np.ndarray, classes: tuple[str, ...], what: str = ""
) -> pa.Array:
    """The names of ClassLabel ids [n] in these rows [n]; UserError for an id without a name."""
    if len(nameless := np.flatnonzero((ids < 0) | (ids >= len(classes)))):
        found = f"{where(table, int(rows[nameless[0]]))} has {what}{ids[nameless[0]]} in {column}"
        raise UserError(f"{found}, but its ClassLabel has names for 0 to {len(classes) - 1} only: correct the row")
    return pa.array(classes).take(pa.array(ids))


# Labels as texts


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
