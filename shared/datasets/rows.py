"""Rows as Arrow tables that know where they came from, and what a column means that a text file wrote without a type.

A table carries its source (`named`), so that an error about a row names its file and its number there.
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
PARTS_KEY = b"accelerate_recipes.parts"  # of several files: [[number of the first row, source], ...] as JSON
ROW_COLUMN = "__row__"  # the number of a row in its source, where that is not its place in the table
AS_WRITTEN = b"accelerate_recipes.as_written"  # in the metadata of a CSV file's columns, which are texts without a type
FILL_IN = "fill it in, or leave such rows out with --skip_incomplete_rows"
NO_VALUE = pa.array(pyarrow.csv.ConvertOptions().null_values)  # "", "NA", "null", "nan", ...: gaps among numbers
INTEGER = r"^[+-]?[0-9]+$"
PLAIN_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"  # which an int64 writes in the same way
NUMBER = r"^[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|(?i:inf|infinity))$"


def named(table: pa.Table, source: str) -> pa.Table:
    """`table`, knowing that it came from `source` ("--train_file reviews.csv"); other metadata are kept."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), SOURCE_KEY: source.encode()})


def source_of(table: pa.Table) -> str:
    """What `named` said, or "the data"."""
    return (table.schema.metadata or {}).get(SOURCE_KEY, b"the data").decode()


def numbered(table: pa.Table) -> pa.Table:
    """`table` with the number of each row in its source, before some of the rows are left out."""
    if ROW_COLUMN in table.column_names:
        return table
    return table.append_column(ROW_COLUMN, pa.array(np.arange(table.num_rows)))


def where(table: pa.Table, row: int) -> str:
    """How to speak to the user about row number `row` (from 0) of `table`: its number in its source, from 1."""
    if ROW_COLUMN in table.column_names:
        row = table[ROW_COLUMN][row].as_py()
    first, source = 0, source_of(table)
    if parts := json.loads((table.schema.metadata or {}).get(PARTS_KEY, b"[]")):
        first, source = parts[bisect.bisect([start for start, _ in parts], row) - 1]
    return f"row {row - first + 1:,} of {source}"


def joined(tables: list[pa.Table], source: str) -> pa.Table:
    """The rows of several files, one after the other, as one table that came from `source`.

    Raises:
        UserError: two of them have other columns, or other types in a column.
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
                f"{source_of(table)} has other columns than {first} (only here: {here}; only there: {there}): give "
                "files with the same columns"
            )
        parts.append(pa.table({name: column_of(table, name, "", as_text=name in untyped) for name in names}))
        try:
            schema = pa.unify_schemas([schema, parts[-1].schema], promote_options="permissive")
        except pa.ArrowTypeError as error:
            raise UserError(f"{source_of(table)} has other values than {first}: {error}") from None
    starts = np.cumsum([0, *(table.num_rows for table in tables)]).tolist()
    sources = [[start, source_of(table)] for start, table in zip(starts, tables, strict=False)]
    whole = pa.concat_tables(parts, promote_options="permissive")
    whole = whole.cast(
        pa.schema([f.with_metadata({AS_WRITTEN: b""} if f.name in untyped else {}) for f in whole.schema])
    )
    return named(whole.replace_schema_metadata({PARTS_KEY: json.dumps(sources).encode()}), source)


def column_of(table: pa.Table, name: str, flag: str, as_text: bool = False) -> pa.ChunkedArray:
    """The column `name`, its dictionary encoding undone; UserError, with `flag` and the columns, if there is none.

    A column of a CSV file is what `typed` takes it for, or, with `as_text`, what is written there.
    """
    if name not in table.column_names:
        raise no_such_column([column for column in table.column_names if column != ROW_COLUMN], name, flag, table)
    column = table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return typed(column) if is_as_written(table, name) and not as_text else column


def no_such_column(names: list[str], name: str, flag: str, source: pa.Table | str) -> UserError:
    """The refusal of a column that is not there, with the one that is meant if it is written almost like it."""
    source = source if isinstance(source, str) else source_of(source)
    alike = [found for found in names if found.strip().casefold() == name.strip().casefold()]
    hint = f": say {flag} {shlex.quote(alike[0])}" if alike else ""
    return UserError(f"{flag} {name}: {source} has no such column (columns: {', '.join(names)}){hint}")


def as_written(table: pa.Table) -> pa.Table:
    """A table of a text file's columns, which are texts and may be numbers, with that said in it."""
    return table.cast(pa.schema([field.with_metadata({AS_WRITTEN: b""}) for field in table.schema]))


def is_as_written(table: pa.Table, name: str) -> bool:
    """Whether a column has been read from a text file and nobody has decided yet what its texts mean."""
    return AS_WRITTEN in (table.schema.field(name).metadata or {})


def is_text(type_: pa.DataType) -> bool:
    """Whether an Arrow type is one of text."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def typed(column: pa.ChunkedArray, as_numbers: bool = False) -> pa.ChunkedArray:
    """What the texts of a CSV column mean, such that nothing of them is lost that could tell two labels apart.

    Integers in their usual form become int64; other integers ("01", "+1") stay texts, without the spaces around them.
    Numbers of which at least one is no integer become float64, and with `as_numbers` integers do, too. Among numbers,
    the usual words for a gap ("", "NA", "null", ...) are null. Anything else stays as it is.
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
    """The tables with the type of the label column decided where a CSV file left it open.

    That of the training table decides: numbers that are not all integers are numbers in the validation table, too, and
    texts are compared as they are written.

    Raises:
        UserError: the labels are numbers, or --problem_type says so, and a row has something else.
    """
    numbers = problem_type == "regression"
    if column in train.column_names and is_as_written(train, column):
        train = _decided(train, column, typed(train[column], numbers), numbers)
    if validation is not None and column in validation.column_names and is_as_written(validation, column):
        like = column_of(train, column, "").type if column in train.column_names else pa.null()
        numbers = numbers or (problem_type is None and pa.types.is_floating(like))
        labels = validation[column]
        if not (is_text(like) and not _all_match(column_of(train, column, "").unique().drop_null(), INTEGER)):
            labels = typed(labels, numbers)
        validation = _decided(validation, column, labels, numbers)
    return train, validation


def _decided(table: pa.Table, column: str, labels: pa.ChunkedArray, numbers: bool) -> pa.Table:
    """`table` with `labels` in a column, no longer as it is written."""
    if numbers and not pa.types.is_floating(labels.type):
        row = next(row for row, text in enumerate(labels.to_pylist()) if not _is_number(text))
        found = labels[row].as_py()
        raise UserError(f"{where(table, row)} has {found!r:.50} in {column}, which is no number: regression needs one")
    return table.set_column(table.schema.get_field_index(column), pa.field(column, labels.type), labels)


def _is_number(text: str) -> bool:
    return pa.types.is_floating(typed(pa.chunked_array([[text]], pa.string()), as_numbers=True).type)


def _all_match(texts: pa.Array, pattern: str) -> bool:
    return pc.all(pc.match_substring_regex(texts, pattern), min_count=0).as_py()


def missing(table: pa.Table, column: str) -> np.ndarray:
    """Which rows have nothing in a column: bool [N]. That is null, NaN, an empty text, or the -1 of a ClassLabel."""
    cells = column_of(table, column, "", as_text=is_text(table[column].type) and is_as_written(table, column))
    gaps = np.asarray(cells.is_null(nan_is_null=True))
    if is_text(cells.type):
        gaps |= np.asarray(pc.fill_null(pc.equal(pc.utf8_trim_whitespace(cells.cast(pa.large_string())), ""), True))
    if pa.types.is_integer(cells.type) and of_datasets.is_class_label(of_datasets.feature(table, column)):
        gaps |= np.asarray(pc.fill_null(pc.equal(cells, -1), True))
    return gaps


def unlabeled(table: pa.Table, column: str) -> bool:
    """Whether no row has a label: all are missing, or -1, the Hub's way to say that they are not published."""
    if column not in table.column_names or not table.num_rows:
        return False
    is_id = pa.types.is_integer(table.schema.field(column).type)
    return bool(missing(table, column).all() or (is_id and pc.all(pc.equal(table[column], -1)).as_py()))


def skip_incomplete(table: pa.Table, columns: Sequence[str]) -> pa.Table:
    """`table` without the rows that have nothing in one of the columns; how many these are is said.

    Raises:
        UserError: no row is left.
    """
    there = [name for name in columns if name in table.column_names]  # others are refused elsewhere
    gaps = {name: missing(table, name) for name in there}
    kept = ~np.any([*gaps.values(), np.zeros(table.num_rows, bool)], axis=0)
    if kept.all():
        return table
    counts = ", ".join(f"{name}: {gap.sum():,}" for name, gap in gaps.items() if gap.any())
    left_out = f"{(~kept).sum():,} of {table.num_rows:,} rows of {source_of(table)} are left out (nothing in {counts})"
    if not kept.any():
        raise UserError(f"--skip_incomplete_rows: {left_out}, so none is left")
    say(left_out)
    return numbered(table).filter(pa.array(kept))
