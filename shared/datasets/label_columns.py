"""Label columns of all tasks: numbers to predict, the names of ClassLabels, and arrays of what the rows contain."""

from collections.abc import Iterator
from itertools import chain

import numpy as np
import pyarrow as pa

from shared.cache.prepared import build_once, key_digest, read_array, write_arrays
from shared.datasets.rows import blocks_of, column_of, content_of, decided, reading_in, refuse_missing, source_of, where
from shared.errors import UserError

FLAG = "--label_column_name"
FORMAT = 1  # part of the cache's names: increase it when the numbers of the same rows change
BLOCK = 1 << 20  # numbers of a memory-mapped array that are read at once
FINEST = 100  # fewest float32 steps per standard deviation that an exported model needs


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
