"""The cells of label columns: their kind, missing cells, vectors of 0 and 1; and the distinct labels of a large table.

The labels of a memory-mapped table are read in blocks. The first row with each of its distinct sets of labels suffices
to learn the labels; the targets of all rows are then written to a file and memory-mapped.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.cache.prepared import array_writer, build_once, key_digest, read_array
from shared.compat import of_datasets
from shared.datasets import arrow_files
from shared.datasets.rows import (
    ROW_COLUMN,
    blocks_of,
    column_of,
    content_of,
    is_text,
    reading_in,
    refuse_missing,
    source_of,
    where,
    without_content,
)
from shared.errors import UserError

Kind = Literal["classification", "multi_label", "regression"]

FLAG = "--label_column_name"
FORMAT = 2  # part of the cache's names: increase it when the files for the same input change
TOO_MANY = "too many for classes: use another column, or --problem_type regression if the labels are numbers"
MOST_DISTINCT = 1 << 20  # different sets of labels of a memory-mapped table
BLOCK = 1 << 20  # numbers of a memory-mapped array that are read at once
FINEST = 100  # fewest float32 steps per standard deviation that an exported model needs
ZERO_ONE = {"0": 0, "1": 1, "false": 0, "true": 1}  # the values of a column for one label, in lower case


def is_list(type_: pa.DataType) -> bool:
    """Whether an Arrow type is a list."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def kind_of_column(type_: pa.DataType, wanted: Kind | None, source: str) -> Kind:
    """The kind of labels in a column of this type, or `wanted`; UserError if the type does not fit that."""
    a_list = is_list(type_)
    is_fraction = pa.types.is_floating(type_) or pa.types.is_decimal(type_)
    is_number = is_fraction or pa.types.is_integer(type_)
    if a_list:
        kind_of_column(type_.value_type, "classification", source)  # refuses lists of lists
    elif not (is_number or is_text(type_) or pa.types.is_boolean(type_) or pa.types.is_null(type_)):
        raise UserError(f"{source} contains {type_}: labels are strings, numbers, booleans, or lists of them")
    kind = wanted or ("multi_label" if a_list else "regression" if is_fraction else "classification")
    if a_list != (kind == "multi_label"):
        needs = "a list of labels, several columns or --label_delimiter" if kind == "multi_label" else "one label"
        raise UserError(f"{source} contains {type_}, but {kind} needs {needs} for each row: see --problem_type")
    if kind == "regression" and not (is_number or pa.types.is_null(type_)):
        raise UserError(f"{source} contains {type_}, but regression needs numbers: see --problem_type")
    return kind


def cells_of(table: pa.Table, column: str, kind: Kind, delimiter: str | None = None) -> tuple[pa.Array, np.ndarray]:
    """The concatenated labels of all rows, and the row number of each; UserError for the first missing label.

    With a delimiter no label can be missing: a row with an empty text has no labels.
    """
    cells = column_of(table, column, FLAG, as_text=delimiter is not None).combine_chunks()
    rows = np.arange(table.num_rows)
    if delimiter is not None:
        kind_of_column(cells.type, "classification", f"--label_delimiter {delimiter}: {source_of(table)}")
        texts = pc.split_pattern(pc.fill_null(cells.cast(pa.string()), ""), delimiter)
        cells, rows = pc.utf8_trim_whitespace(pc.list_flatten(texts)), np.asarray(pc.list_parent_indices(texts))
        given = np.asarray(pc.not_equal(cells, ""))
        return cells.filter(pa.array(given)), rows[given]
    if kind == "multi_label":
        refuse_missing(table, column, cells.is_null(), rows)
        lists = cells.cast(pa.list_(cells.type.value_type))
        cells, rows = pc.list_flatten(lists), np.asarray(pc.list_parent_indices(lists))
    if pa.types.is_decimal(cells.type):
        cells = cells.cast(pa.float64())
    if pa.types.is_large_string(cells.type) or pa.types.is_string_view(cells.type):
        cells = cells.cast(pa.string())
    refuse_missing(table, column, cells.is_null(nan_is_null=True), rows)
    if pa.types.is_string(cells.type):
        refuse_missing(table, column, pc.equal(pc.utf8_trim_whitespace(cells), ""), rows)
    if class_names(table, column):  # on the Hub, -1 means that the labels of a test split are not published
        refuse_missing(table, column, pc.equal(cells, -1), rows)
    return cells, rows


def contains_delimiter(table: pa.Table, column: str, delimiter: str) -> bool:
    """Whether any row contains the delimiter."""
    texts = column_of(table, column, FLAG, as_text=True).cast(pa.string())
    return pc.any(pc.match_substring(texts, delimiter)).as_py() or False


def zeros_and_ones(cells: pa.Array) -> np.ndarray:
    """int64: the 0 or 1 of each cell, and -1 for another value."""
    texts = pc.utf8_lower(pc.utf8_trim_whitespace(texts_of(cells)))
    found = pc.index_in(texts, pa.array(list(ZERO_ONE)))
    return np.array([*ZERO_ONE.values(), -1])[np.asarray(pc.fill_null(found, -1))]


def zero_one_column(table: pa.Table, column: str) -> np.ndarray:
    """int64 [N]: the 0 or 1 in the column of one label; UserError for a row with another value."""
    kind_of_column(column_of(table, column, FLAG).type, "classification", f"{FLAG} {column}: {source_of(table)}")
    cells, _ = cells_of(table, column, "classification")
    marks = zeros_and_ones(cells)
    if len(others := np.flatnonzero(marks < 0)):
        row = int(others[0])
        raise UserError(
            f"{where(table, row)} has {cells[row]} in {column}: with several label columns, write 1 if the row has the "
            "label of the column's name, otherwise 0"
        )
    return marks


def vector_width(cells: pa.Array, rows: np.ndarray, table: pa.Table) -> int:
    """The length of the lists if all are vectors of 0 and 1 with the same length of at least two; otherwise 0."""
    widths = np.bincount(rows, minlength=table.num_rows)
    text = pa.types.is_string(cells.type)
    is_vector = not text and widths[0] > 1 and (widths == widths[0]).all() and (zeros_and_ones(cells) >= 0).all()
    return int(widths[0]) if is_vector else 0


def vectors_of(table: pa.Table, column: str, cells: pa.Array, rows: np.ndarray, width: int) -> np.ndarray:
    """int64 [N, width]; UserError for a row that is not a vector of 0 and 1 with this width."""
    wrong = np.bincount(rows, minlength=table.num_rows) != width
    marks = zeros_and_ones(cells)
    wrong[rows[marks < 0]] = True
    if len(found := np.flatnonzero(wrong)):
        row = int(found[0])
        raise UserError(
            f"{where(table, row)} has {str(table[column][row].as_py())[:60]} in {column}, where the training data has "
            f"0 or 1 for each of {width} labels: write such a list"
        )
    return marks.reshape(table.num_rows, width)


def is_whole(cells: pa.Array) -> np.ndarray:
    numbers = cells.to_numpy()
    return (numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53)


def texts_of(cells: pa.Array) -> pa.Array:
    """The labels as strings. Whole floats become integers: some programs store integers with gaps as floats."""
    if pa.types.is_floating(cells.type) and is_whole(cells).all():
        cells = cells.cast(pa.int64())
    return cells.cast(pa.string())


def numbers_of(table: pa.Table, column: str, cells: pa.Array) -> np.ndarray:
    """float64 [N]; UserError for a number that is not finite in float32, the type of the model's output."""
    numbers = cells.cast(pa.float64()).to_numpy()
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused
        finite = np.isfinite(numbers.astype(np.float32))
    if len(infinite := np.flatnonzero(~finite)):
        row = int(infinite[0])
        raise UserError(f"{where(table, row)} has {cells[row]} in {column}, not finite in float32: correct the row")
    return numbers


def refuse_outliers(table: pa.Table, column: str, numbers: np.ndarray) -> None:
    """Refuse one number, or up to 1 % of the numbers [N], beside which float32 cannot distinguish the others.

    Standardized together, the others would all become the same target. `numbers` may be memory-mapped.

    Raises:
        UserError: names the row of the first such number.
    """
    usual = float(np.median(numbers[:: len(numbers) // BLOCK + 1]))
    starts = range(0, len(numbers), BLOCK)
    blocks = [slice(start, start + BLOCK) for start in starts]
    largest = max(float(np.abs(numbers[block]).max()) for block in blocks)
    limit = FINEST * (step := float(np.spacing(np.float32(largest))))
    far, varies = [], False
    for block in blocks:
        distances = np.abs(numbers[block] - usual)
        far.append(block.start + np.flatnonzero(distances >= limit))
        varies |= bool(((distances > 0) & (distances < limit)).any())
    rows = np.concatenate(far)
    if varies and 0 < len(rows) <= max(1, len(numbers) // 100):
        row = int(rows[0])
        raise UserError(
            f"{where(table, row)} has {numbers[row]:g} in {column}, where most rows have about {usual:.4g}: float32, "
            f"the dtype of a model's outputs, has steps of {step:.2g} at {largest:.4g}, so it cannot distinguish the "
            "others: correct the row, or give the logarithms of the column"
        )


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


# Memory-mapped tables


def distinct_rows(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """The first row of each different set of labels of a memory-mapped table, in memory, with its row number.

    A table in memory is returned unchanged.

    Raises:
        UserError: there are too many different ones.
    """
    if not content_of(table):
        return table

    seen: set[str] = set()

    def is_new(_: int, block: pa.Table) -> np.ndarray:
        new = []
        for key in _keys(block, columns).to_pylist():
            new.append(key not in seen)
            seen.add(key)
        if len(seen) > MOST_DISTINCT:
            found = f"more than {MOST_DISTINCT:,} different values in {', '.join(columns)}"
            raise UserError(f"{source_of(table)} has {found}, {TOO_MANY}")
        return np.array(new, bool)

    of_labels = table.select([*columns, *({ROW_COLUMN} & {*table.column_names})])
    return without_content(arrow_files.filtered(of_labels, is_new, "distinct", columns))


def stored_targets(
    table: pa.Table, columns: Sequence[str], are_numbers: bool, encode: Callable[[pa.Table], np.ndarray], settings: str
) -> np.ndarray:
    """The targets of the rows of a memory-mapped table, memory-mapped.

    Args:
        table: the rows.
        columns: of the labels.
        are_numbers: whether the targets are numbers instead of labels.
        encode: gives the targets of the rows of a table in memory.
        settings: everything else that the targets depend on.

    Raises:
        UserError: see `distinct_rows` and `encode`.
    """

    def build(folder: Path) -> None:
        few = table.slice(0, 0) if are_numbers else distinct_rows(table, columns)
        known, keys = encode(few), _keys(few, columns)
        with array_writer(folder / "targets.npy", known.dtype, *known.shape[1:]) as append:
            for block in blocks_of(table):
                append(encode(block) if are_numbers else known[pc.index_in(_keys(block, columns), keys).to_numpy()])

    readings = [reading_in(table, name) for name in columns]
    name = key_digest(FORMAT, content_of(table), columns, settings, readings)
    return read_array(build_once(f"targets-{name}", build) / "targets.npy")


def _keys(block: pa.Table, columns: Sequence[str]) -> pa.Array:
    """A text for each row of a block; rows have the same text if and only if they have the same labels."""
    if len(columns) == 1 and not is_list(block.schema.field(columns[0]).type):
        return block[columns[0]].combine_chunks().cast(pa.string())
    return pa.array(map(repr, block.select(columns).to_pylist()), pa.string())
