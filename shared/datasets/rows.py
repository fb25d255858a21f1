"""Arrow tables that know their source, and the types of the untyped columns of a text file.

A table stores its source in its metadata (`named`), so that an error about a row names its file and row number.
"""

import bisect
import json
import shlex
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from shared.compat import of_datasets
from shared.errors import UserError, say

SOURCE_KEY = b"accelerate_recipes.source"  # in the schema's metadata
PARTS_KEY = b"accelerate_recipes.parts"  # for several files: [[number of the first row, source], ...] as JSON
ROW_COLUMN = "__row__"  # the row number in the source, where it differs from the position in the table
AS_WRITTEN = b"accelerate_recipes.as_written"  # in the metadata of a CSV file's columns: text whose type is undecided
FILL_IN = "fill it in, or skip such rows with --skip_incomplete_rows"
NO_VALUE = pa.array(pyarrow.csv.ConvertOptions().null_values)  # "", "NA", "null", "nan", ...: gaps among numbers
INTEGER = r"^[+-]?[0-9]+$"
PLAIN_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"  # equal to str() of the int64 that it means
NUMBER = r"^[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|(?i:inf|infinity))$"


def named(table: pa.Table, source: str) -> pa.Table:
    """`table` with `source` ("--train_file reviews.csv") in its metadata; other metadata are kept."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), SOURCE_KEY: source.encode()})


def source_of(table: pa.Table) -> str:
    """The source that `named` stored, or "the data"."""
    return (table.schema.metadata or {}).get(SOURCE_KEY, b"the data").decode()


def numbered(table: pa.Table) -> pa.Table:
    """`table` with a column of the row numbers in its source. Call it before rows are removed."""
    if ROW_COLUMN in table.column_names:
        return table
    return table.append_column(ROW_COLUMN, pa.array(np.arange(table.num_rows)))


def where(table: pa.Table, row: int) -> str:
    """Row `row` (from 0) of `table` in the words of a message: "row 7 of --train_file a.csv", counted from 1."""
    if ROW_COLUMN in table.column_names:
        row = table[ROW_COLUMN][row].as_py()
    first, source = 0, source_of(table)
    if parts := json.loads((table.schema.metadata or {}).get(PARTS_KEY, b"[]")):
        first, source = parts[bisect.bisect([start for start, _ in parts], row) - 1]
    return f"row {row - first + 1:,} of {source}"


def joined(tables: list[pa.Table], source: str) -> pa.Table:
    """The concatenated rows of several files, as one table with the source `source`.

    Raises:
        UserError: two of them have different columns, or different types in a column.
    """
    if len(tables) == 1:
        return tables[0]
    first, names = source_of(tables[0]), tables[0].column_names
    untyped = {name for name in names if all(name in t.column_names and is_as_written(t, name) for t in tables)}
    schema, parts = pa.schema([]), []
    for table in tables:
        found = table.column_names
        if {*found} != {*names}:
            here, there = (", ".join(n for n in a if n not in b) or "none" for a, b in ((found, names), (names, found)))
            raise UserError(
                f"{source_of(table)} has other columns than {first} (only in the former: {here}; only in the latter: "
                f"{there}): use files with the same columns"
            )
        parts.append(pa.table({name: column_of(table, name, "", as_text=name in untyped) for name in names}))
        try:
            schema = pa.unify_schemas([schema, parts[-1].schema], promote_options="permissive")
        except pa.ArrowTypeError as error:
            raise UserError(f"{source_of(table)} has columns of other types than {first}: {error}") from None
    starts = np.cumsum([0, *(table.num_rows for table in tables)]).tolist()
    sources = [[start, source_of(table)] for start, table in zip(starts, tables, strict=False)]
    whole = pa.concat_tables(parts, promote_options="permissive")
    whole = whole.cast(
        pa.schema([f.with_metadata({AS_WRITTEN: b""} if f.name in untyped else {}) for f in whole.schema])
    )
    return named(whole.replace_schema_metadata({PARTS_KEY: json.dumps(sources).encode()}), source)


def column_of(table: pa.Table, name: str, flag: str, as_text: bool = False) -> pa.ChunkedArray:
    """The column `name`, without dictionary encoding.

    A column of a CSV file has the type that `typed` infers; with `as_text`, it is the text of the file.

    Raises:
        UserError: there is no such column; names `flag` and the existing columns.
    """
    if name not in table.column_names:
        raise no_such_column([column for column in table.column_names if column != ROW_COLUMN], name, flag, table)
    column = table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return typed(column) if is_as_written(table, name) and not as_text else column


def no_such_column(names: list[str], name: str, flag: str, source: pa.Table | str) -> UserError:
    """The error about a missing column; it suggests a column whose name differs only in case or outer white space."""
    source = source if isinstance(source, str) else source_of(source)
    alike = [found for found in names if found.strip().casefold() == name.strip().casefold()]
    hint = f": use {flag} {shlex.quote(alike[0])}" if alike else ""
    return UserError(f"{flag} {name}: {source} has no such column (columns: {', '.join(names)}){hint}")


def as_written(table: pa.Table) -> pa.Table:
    """`table` with all columns marked as read from a text file: text whose type is undecided."""
    return table.cast(pa.schema([field.with_metadata({AS_WRITTEN: b""}) for field in table.schema]))


def is_as_written(table: pa.Table, name: str) -> bool:
    """Whether a column was read from a text file and its type is still undecided."""
    return AS_WRITTEN in (table.schema.field(name).metadata or {})


def is_text(type_: pa.DataType) -> bool:
    """Whether an Arrow type is text."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def typed(column: pa.ChunkedArray, as_numbers: bool = False) -> pa.ChunkedArray:
    """A CSV column with its inferred type, such that different labels stay different.

    A column of integers in their usual form becomes int64. With other integers ("01", "+1") it stays text, without
    outer white space. A column of numbers with at least one non-integer becomes float64; with `as_numbers`, integers
    do, too. Among numbers, the usual words for a gap ("", "NA", "null", ...) become null. Other columns are unchanged.
    """
    bare = pc.utf8_trim_whitespace(column)
    bare = pc.if_else(pc.is_in(bare, NO_VALUE), pa.scalar(None, pa.string()), bare)
    distinct = bare.unique().drop_null()
    integers = _all_match(distinct, INTEGER)
    if not integers and not _all_match(distinct, NUMBER):
        return column
    if as_numbers or not integers:
        return bare.cast(pa.float64())
    return bare.cast(pa.int64()) if _all_match(distinct, PLAIN_INTEGER) else bare


def with_labels(
    train: pa.Table, validation: pa.Table | None, column: str, problem_type: str | None
) -> tuple[pa.Table, pa.Table | None]:
    """Both tables with a decided type of the label column, where a CSV file left it undecided.

    The training table determines the type in the validation table: float stays float, and text is compared as written.

    Raises:
        UserError: the labels are numbers, or --problem_type requires numbers, and a row has something else.
    """
    numbers = problem_type == "regression"
    if column in train.column_names and is_as_written(train, column):
        train = _with_column(train, column, typed(train[column], numbers), numbers)
    if validation is not None and column in validation.column_names and is_as_written(validation, column):
        like = column_of(train, column, "").type if column in train.column_names else pa.null()
        numbers = numbers or (problem_type is None and pa.types.is_floating(like))
        labels = validation[column]
        if not (is_text(like) and not _all_match(column_of(train, column, "").unique().drop_null(), INTEGER)):
            labels = typed(labels, numbers)
        validation = _with_column(validation, column, labels, numbers)
    return train, validation


def _with_column(table: pa.Table, column: str, labels: pa.ChunkedArray, numbers: bool) -> pa.Table:
    """`table` with `labels` as a column whose type is decided."""
    if numbers and not pa.types.is_floating(labels.type):
        row = next(row for row, text in enumerate(labels.to_pylist()) if not _is_number(text))
        found = labels[row].as_py()
        raise UserError(f"{where(table, row)} has {found!r:.50} in {column}: regression needs a number")
    return table.set_column(table.schema.get_field_index(column), pa.field(column, labels.type), labels)


def _is_number(text: str) -> bool:
    return pa.types.is_floating(typed(pa.chunked_array([[text]], pa.string()), as_numbers=True).type)


def _all_match(texts: pa.Array, pattern: str) -> bool:
    return pc.all(pc.match_substring_regex(texts, pattern), min_count=0).as_py()


def missing(table: pa.Table, column: str) -> np.ndarray:
    """bool [N]: which rows have no value in a column, that is null, NaN, an empty text, or -1 in a ClassLabel."""
    cells = column_of(table, column, "", as_text=is_text(table[column].type) and is_as_written(table, column))
    gaps = np.asarray(cells.is_null(nan_is_null=True))
    if is_text(cells.type):
        gaps |= np.asarray(pc.fill_null(pc.equal(pc.utf8_trim_whitespace(cells.cast(pa.large_string())), ""), True))
    if pa.types.is_integer(cells.type) and of_datasets.is_class_label(of_datasets.feature(table, column)):
        gaps |= np.asarray(pc.fill_null(pc.equal(cells, -1), True))
    return gaps


def unlabeled(table: pa.Table, column: str) -> bool:
    """Whether all labels are missing, or all are -1, which on the Hub means that they are not published."""
    if column not in table.column_names or not table.num_rows:
        return False
    is_id = pa.types.is_integer(table.schema.field(column).type)
    return bool(missing(table, column).all() or (is_id and pc.all(pc.equal(table[column], -1)).as_py()))


def skip_incomplete(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """`table` without the rows that have no value in one of the columns; prints how many are skipped.

    Raises:
        UserError: no row is left.
    """
    there = [name for name in columns if name in table.column_names]  # missing columns raise an error elsewhere
    gaps = {name: missing(table, name) for name in there}
    kept = ~np.any([*gaps.values(), np.zeros(table.num_rows, bool)], axis=0)
    if kept.all():
        return table
    counts = ", ".join(f"{name}: {gap.sum():,}" for name, gap in gaps.items() if gap.any())
    left_out = f"{(~kept).sum():,} of {table.num_rows:,} rows of {source_of(table)} are skipped (no value in {counts})"
    if not kept.any():
        raise UserError(f"--skip_incomplete_rows: {left_out}, so no row is left")
    say(left_out)
    return numbered(table).filter(pa.array(kept))
