"""Arrow tables: their source, the types of the untyped columns of a text file, and memory-mapped files of the cache.

A table stores its source in its metadata (`named`), so that an error about a row names its file and row number.

The first process of a machine writes the rows of files into an Arrow file, block by block, and all processes map it. A
table that is not small has a digest of its rows in its metadata (`content_of`), so that whatever is made from it can be
found in the cache without reading the rows. A selection of its rows is such a table, too. What is made from a small
table is in memory.
"""

import bisect
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from numpy.typing import NDArray

from shared.cache.prepared import build_once, key_digest, text_once
from shared.compat import of_datasets
from shared.datasets.readers import AS_WRITTEN, is_compressed, is_list, kind_of, opened
from shared.errors import UserError, about

SOURCE_KEY = b"accelerate_recipes.source"  # in the schema's metadata
PARTS_KEY = b"accelerate_recipes.parts"  # for several files: [[number of the first row, source], ...] as JSON
CONTENT_KEY = b"accelerate_recipes.content"  # for a memory-mapped table: the number and a digest of its rows
ROW_COLUMN = "accelerate_recipes.row"  # the row number in the source, where it is not the position in the table
FORMAT = 5  # part of the cache's names: increase it when the files for the same input change
ROWS = "rows.arrow"  # the file in a folder of the cache
IN_MEMORY = 1 << 24  # maximum number of bytes of a small table
BLOCK_ROWS = 1 << 18  # maximum number of rows in a block of a table
FILL_IN = "fill it in, or skip such rows with --skip_incomplete_rows"
NO_VALUE = pa.array(pyarrow.csv.ConvertOptions().null_values)  # "", "NA", "null", "nan", ...: gaps among numbers
INTEGER = r"^[+-]?[0-9]+$"
PLAIN_INTEGER = r"^(0|-?[1-9][0-9]{0,17})$"  # equal to str() of the int64 that it means
NUMBER = r"^[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|(?i:inf|infinity))$"

Blocks = Iterable[pa.Table]
Reader = Callable[[Path, str], Blocks]  # reader(file, source): the rows of a file


def named(table: pa.Table, source: str) -> pa.Table:
    """`table` with `source` ("--train_file reviews.csv") in its metadata; other metadata are kept."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), SOURCE_KEY: source.encode(errors="replace")})


def source_of(table: pa.Table) -> str:
    """The source that `named` stored, or "the data"."""
    return (table.schema.metadata or {}).get(SOURCE_KEY, b"the data").decode()


def with_content(table: pa.Table, content: str | None) -> pa.Table:
    """A memory-mapped table with a digest of its rows in its metadata; None for a table in memory."""
    given = f"{table.num_rows} {content}" if content else ""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), CONTENT_KEY: given.encode()})


def content_of(table: pa.Table) -> str | None:
    """The digest that `with_content` stored for these rows; None for other tables, such as a selection of the rows."""
    rows, _, content = (table.schema.metadata or {}).get(CONTENT_KEY, b"").decode().partition(" ")
    return content if rows == str(table.num_rows) else None


def numbered(table: pa.Table, first: int = 0) -> pa.Table:
    """`table` with a column of the row numbers in its source, from `first`. Call it before rows are removed."""
    if ROW_COLUMN in table.column_names:
        return table
    return table.append_column(ROW_COLUMN, pa.array(np.arange(first, first + table.num_rows)))


def blocks_of(table: pa.Table) -> Iterator[pa.Table]:
    """The rows of a table in blocks that fit into memory, each with its row numbers."""
    first = 0
    for batch in table.to_batches(max_chunksize=BLOCK_ROWS):
        yield numbered(pa.Table.from_batches([batch], table.schema), first)
        first += batch.num_rows


def where(table: pa.Table, row: int) -> str:
    """Row `row` (from 0) of `table` in the words of a message: "row 7 of --train_file a.csv", counted from 1."""
    if ROW_COLUMN in table.column_names:
        row = table[ROW_COLUMN][row].as_py()
    first, source = 0, source_of(table)
    if parts := json.loads((table.schema.metadata or {}).get(PARTS_KEY, b"[]")):
        first, source = parts[bisect.bisect([start for start, _ in parts], row) - 1]
    return f"row {row - first + 1:,} of {source}"


def column_of(table: pa.Table, name: str, flag: str) -> pa.ChunkedArray:
    """The column `name`, without dictionary encoding; of a CSV file, as text, unless `decided` gave it a type.

    Raises:
        UserError: there is no such column; names `flag` and the existing columns.
    """
    if name not in table.column_names:
        names = ", ".join(found for found in table.column_names if found != ROW_COLUMN)
        raise UserError(f"{flag} {name}: {source_of(table)} has no such column (columns: {names})")
    column = table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return read_as(column, reading_in(table, name) or "text")


def typed_column_of(table: pa.Table, name: str) -> pa.ChunkedArray:
    """As `column_of`; a column of a CSV file has the type that `reading_of` infers."""
    column = column_of(table, name, "")
    return read_as(column, reading_of(column)) if reading_in(table, name) == "" else column


def reading_in(table: pa.Table, name: str) -> str | None:
    """How a column of a text file is read: see `read_as`; "" if that is undecided, None for a column with a type."""
    decided = (table.schema.field(name).metadata or {}).get(AS_WRITTEN)
    return None if decided is None else decided.decode()


def is_text(type_: pa.DataType) -> bool:
    """Whether an Arrow type is text."""
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def reading_of(column: pa.ChunkedArray, as_numbers: bool = False) -> str:
    """How a CSV column is read ("text", "bare text", "int64" or "float64"), such that different labels stay different.

    A column of integers in their usual form becomes int64. With other integers ("01", "+1") it stays text, without
    outer white space. A column of numbers with at least one non-integer becomes float64; with `as_numbers`, integers
    do, too. Among numbers, the usual words for a gap ("", "NA", "null", ...) become null. Other columns are unchanged.
    """
    integers = plain = True
    for chunk in column.chunks:
        distinct = _without_gaps(chunk).unique().drop_null()
        if not _all_match(distinct, NUMBER):
            return "text"
        integers = integers and _all_match(distinct, INTEGER)
        plain = plain and integers and _all_match(distinct, PLAIN_INTEGER)
    if as_numbers or not integers:
        return "float64"
    return "int64" if plain else "bare text"


def read_as(column: pa.ChunkedArray, reading: str) -> pa.ChunkedArray:
    """A CSV column, read in this way."""
    if reading == "text":
        return column
    bare = _without_gaps(column)
    return bare if reading == "bare text" else bare.cast(pa.float64() if reading == "float64" else pa.int64())


def _without_gaps(texts: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    bare = pc.utf8_trim_whitespace(texts)
    return pc.if_else(pc.is_in(bare, NO_VALUE), pa.scalar(None, pa.string()), bare)


def decided(table: pa.Table, column: str, problem_type: str | None, like: pa.Table | None = None) -> pa.Table:
    """`table` with a decided type of the label column, where a CSV file left it undecided; read later in this way.

    The first process of a machine reads the column of a memory-mapped table, once. A training table `like` determines
    the type in the validation table: float stays float, and text is compared as written.

    Raises:
        UserError: the labels are numbers, or --problem_type requires numbers, and a row has something else.
    """
    if column not in table.column_names or reading_in(table, column) != "":
        return table
    numbers, as_text = problem_type == "regression", False
    if like is not None and column in like.column_names:
        type_ = column_of(like.slice(0, 0), column, "").type
        numbers = numbers or (problem_type is None and pa.types.is_floating(type_))
        as_text = is_text(type_) and reading_in(like, column) != "bare text"

    content = content_of(table)
    name = content and f"reading-{key_digest(FORMAT, content, column, numbers)}"
    reading = "text" if as_text else text_once(name, "reading", lambda: reading_of(table[column], numbers))
    if numbers and reading != "float64":
        is_number = pc.match_substring_regex(_without_gaps(table[column]), NUMBER)
        row = pc.index(is_number, False).as_py()
        found = table[column][row].as_py()
        raise UserError(f"{where(table, row)} has {found!r:.50} in {column}: regression needs a number")
    place = table.schema.get_field_index(column)
    return table.set_column(place, pa.field(column, pa.string(), metadata={AS_WRITTEN: reading}), table[column])


def _all_match(texts: pa.Array, pattern: str) -> bool:
    return pc.all(pc.match_substring_regex(texts, pattern), min_count=0).as_py()


def missing(table: pa.Table, column: str, of_values: bool = False) -> np.ndarray:
    """bool [N]: which rows have no value: null, NaN, an empty text, -1 in a ClassLabel, a list with such an entry, or a
    struct of nulls, such as an image without bytes and path. Only in lists `of_values`, such as labels, an empty text
    is no value; in lists of words, it is a word.
    """
    cells = column_of(table, column, "")
    gaps = np.asarray(cells.is_null())
    values, rows = cells, np.arange(len(cells))
    if is_list(cells.type):
        values, rows = pc.list_flatten(cells), np.asarray(pc.list_parent_indices(cells))
    without = values.is_null(nan_is_null=True)
    if is_text(values.type) and (of_values or values is cells):
        texts = values.cast(pa.large_string())  # not trimmed, which would copy all texts
        without = pc.fill_null(pc.or_(pc.equal(texts, ""), pc.utf8_is_space(texts)), True)
    if of_datasets.class_names(table, column):
        without = pc.or_(without, pc.fill_null(pc.equal(values, -1), True))
    gaps[rows[np.asarray(without)]] = True
    if pa.types.is_struct(cells.type):
        gaps |= np.logical_and.reduce([np.asarray(pc.struct_field(cells, i).is_null()) for i in range(len(cells.type))])
    return gaps


def unlabeled(table: pa.Table, column: str) -> bool:
    """Whether all labels are missing, as where they are not published; also of a table without rows."""
    return column in table.column_names and bool(missing(table, column, of_values=True).all())


def refuse_missing(
    table: pa.Table, column: str, missing: pa.Array, rows: np.ndarray | None = None, what: str = "label"
) -> None:
    """Raise UserError for the first of the values that are missing; `rows` are their rows, by default all rows."""
    if len(found := np.flatnonzero(missing)):
        row = int(found[0] if rows is None else rows[found[0]])
        raise UserError(f"{where(table, row)} has no {what} in {column}: {FILL_IN}")


def load_files(files: Sequence[Path], flag: str, source: str, read: Reader, how: str = "") -> pa.Table:
    """The rows of all files, as one memory-mapped table with the source `source`.

    Args:
        files: of kinds that the reader knows.
        flag: the flag that names them.
        source: see `rows.named`.
        read: the reader.
        how: everything but the files that the rows depend on.

    Raises:
        UserError: a file cannot be read, or two of them have different columns, types or ClassLabels; names `flag`.
    """
    sources = [f"{flag} {file}" for file in files]
    source = source if len(files) > 1 else sources[0]
    states = [state_of(file, name) for file, name in zip(files, sources, strict=True)]
    key = FORMAT, sorted({kind_of(file) for file in files}), how

    def build(folder: Path) -> None:
        digest = hashlib.blake2b(repr(key).encode(), digest_size=16)
        for file in files:
            with file.open("rb") as content:
                digest.update(file.suffix.encode() if is_compressed(file) else b"")
                digest.update(hashlib.file_digest(content, "blake2b").digest())
        starts = _write(folder, lambda: [read(file, name) for file, name in zip(files, sources, strict=True)], sources)
        (folder / "facts.json").write_text(json.dumps({"content": digest.hexdigest(), "starts": starts}))

    folder = build_once(f"rows-{key_digest(key, states)}", build)
    facts = json.loads((folder / "facts.json").read_text())
    parts = json.dumps([*zip(facts["starts"], sources, strict=True)] if len(files) > 1 else [])
    table = _mapped(folder)
    table = named(table.replace_schema_metadata({**(table.schema.metadata or {}), PARTS_KEY: parts.encode()}), source)
    return of_content(table, facts["content"])


def of_content(table: pa.Table, content: str) -> pa.Table:
    """A memory-mapped table with a digest of its rows in its metadata. A small table is unchanged."""
    return with_content(table, content) if table.nbytes > IN_MEMORY else table


def filtered(table: pa.Table, choose: Callable[[], NDArray[np.bool_]], *key: object) -> pa.Table:
    """The rows that `choose` chooses, with their row numbers; memory-mapped if the table is.

    Args:
        table: the rows.
        choose: returns bool [rows]. It is not called for rows that are in the cache.
        key: identifies the selection, together with the content of the table.
    """
    chosen, first = cache(choose), 0

    def keep(block: pa.Table) -> pa.Table:
        nonlocal first
        first += block.num_rows
        # `filter` instead of `take`, which joins the chunks of a column and overflows with more than 2 GiB of text.
        return block.filter(pa.array(chosen()[first - block.num_rows : first]))

    selected = converted(table, keep, *key)
    schema = numbered(table.slice(0, 0)).schema  # types of columns may have been decided since the file was written
    return pa.Table.from_arrays(selected.columns, schema=schema.with_metadata(selected.schema.metadata))


def converted(table: pa.Table, convert: Callable[[pa.Table], pa.Table], *key: object) -> pa.Table:
    """The rows that `convert` makes from a table; memory-mapped if the table is.

    Args:
        table: the rows.
        convert: called with each block of the table, in order, which has row numbers.
        key: identifies the conversion, together with the content of the table.
    """
    if not content_of(table):
        return with_content(convert(numbered(table)).replace_schema_metadata(table.schema.metadata), None)
    content = key_digest(FORMAT, content_of(table), *key)
    write = partial(_write, read_all=lambda: [map(convert, blocks_of(table))], sources=[""])
    made = _mapped(build_once(f"rows-{content}", write))
    return with_content(made.replace_schema_metadata(table.schema.metadata), content)


def _write(
    folder: Path, read_all: Callable[[], Sequence[Blocks]], sources: Sequence[str], schema: pa.Schema | None = None
) -> list[int]:
    """Write the blocks of all sources into an Arrow file; return the number of the first row of each source.

    If blocks have different types, all are read a second time, and converted to the types that fit all of them.

    Raises:
        UserError: no type fits two blocks, or two sources have different columns or ClassLabels.
    """
    starts: list[int] = []
    names: set[str] = set()
    classes: dict[str, tuple[str, ...]] = {}
    rows, wider = 0, schema
    with (folder / ROWS).open("wb") as file, ExitStack() as stack:
        writer = None
        for blocks, source in zip(read_all(), sources, strict=True):
            starts.append(rows)
            found: set[str] = set()
            for block in blocks:
                with about(source):
                    wider = pa.unify_schemas([wider or block.schema, block.schema], promote_options="permissive")
                schema = schema or wider
                writer = writer or stack.enter_context(pa.ipc.new_file(file, schema))
                if wider == schema:  # otherwise, only the types are collected
                    with about(f"{source} has other types than other rows: save all with the same types"):
                        typed = pa.concat_tables([schema.empty_table(), block], promote_options="permissive")
                    writer.write_table(typed)
                rows += block.num_rows
                found |= {*block.column_names}
                own = {name: of_datasets.class_names(block, name) for name in block.column_names}
                classes = {**own, **classes}
                if others := [name for name in own if own[name] != classes[name]]:
                    raise UserError(
                        f"{source} has another ClassLabel in {others[0]} than {sources[0]}, so the same number would "
                        "mean different labels: save both with the same names, or the labels as text"
                    )
            names = names or found
            if found != names:
                raise UserError(
                    f"{source} has other columns than {sources[0]}: only one of them has "
                    f"{', '.join(sorted(found ^ names))}"
                )
    return starts if wider == schema else _write(folder, read_all, sources, wider)


def state_of(file: Path, source: str) -> tuple[str, int, int, int, int]:
    """The path, inode, size and times of a file: st_ctime, too, because rsync -t and cp -p restore only st_mtime.

    Raises:
        UserError: the file cannot be opened; the message begins with `source`.
    """
    with opened(file, source):
        status = file.stat()
    return str(file.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _mapped(folder: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(folder / ROWS))).read_all()
