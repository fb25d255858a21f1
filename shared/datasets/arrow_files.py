"""Tables of files: in memory if they are small, otherwise in Arrow files of the cache folder, memory-mapped.

The first process of a machine writes an Arrow file, block by block, and all processes map it. Such a table has a digest
of its rows in its metadata (`rows.content_of`), so that whatever is made from it can be found in the cache without
reading the rows. A selection of its rows is such a table, too.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.cache.prepared import build_once, cache_dir, is_complete, key_digest
from shared.datasets import readers
from shared.datasets.files import is_compressed, kind_of, opened
from shared.datasets.rows import (
    PARTS_KEY,
    blocks_of,
    content_of,
    joined,
    named,
    numbered,
    refuse_other_columns,
    with_content,
)
from shared.errors import UserError

FORMAT = 1  # part of the cache's names: increase it when the files for the same input change
IN_MEMORY = 1 << 24  # maximum number of bytes of a table that stays in memory

Blocks = Iterable[pa.Table]
Reader = Callable[[Path, str], Blocks]  # reader(file, source): the rows of a file


def load(
    files: Sequence[Path],
    flag: str,
    source: str,
    csv_delimiter: str | None = None,
    reader: tuple[str, Reader] | None = None,
) -> pa.Table:
    """The rows of all files, as one table with the source `source`.

    Args:
        files: of kinds that the reader knows.
        flag: the flag that names them.
        source: see `rows.named`.
        csv_delimiter: of CSV files.
        reader: instead of `readers.blocks`; with a name, which is part of the cache's names.

    Raises:
        UserError: a file cannot be read, or two of them have different columns or types; names `flag`.
    """
    sources, kinds = [f"{flag} {file}" for file in files], [kind_of(file) for file in files]
    how = csv_delimiter if min(kinds) in (".csv", ".tsv") else None
    read: Reader = partial(readers.blocks, csv_delimiter=csv_delimiter)
    if reader:
        how, read = repr((reader[0], kinds)), reader[1]
    tables, room = [], IN_MEMORY
    if reader and is_complete(cache_dir() / _name(files, sources, how)):
        room = -1  # the rows are known to be large; parsing CoNLL to find this out is slow
    for file, name in zip(files, sources, strict=True):
        if room < 0 or (table := in_memory(read(file, name), name, room)) is None:
            if not reader and len({*kinds}) > 1:
                raise UserError(
                    f"{source}: files of several kinds ({', '.join(sorted({*kinds}))}) can be read together only if "
                    f"their rows take at most {IN_MEMORY >> 20} MiB: convert them to one kind"
                )
            return _stored_files(files, sources, source if len(files) > 1 else name, read, how)
        tables.append(named(table, name))
        room -= table.nbytes
    return joined(tables, source)


def in_memory(blocks: Blocks, source: str, most_bytes: float = float("inf")) -> pa.Table | None:
    """The rows of a file, in memory; None if they take more than `most_bytes` there.

    Raises:
        UserError: two rows disagree about the type of a column.
    """
    tables = []
    for table in blocks:
        tables.append(table)
        most_bytes -= table.nbytes
        if most_bytes < 0:
            return None
    if len(tables) == 1:
        return tables[0]
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise UserError(f"{source} is malformed: {readers.first_line(error)}") from None


def _name(files: Sequence[Path], sources: Sequence[str], how: str | None) -> str:
    """The name of the folder of `_stored_files`, which depends on the files' states.

    Raises:
        UserError: a file does not exist or cannot be read.
    """
    states = []
    for file, name in zip(files, sources, strict=True):
        with opened(file, name):
            states.append(_state_of(file))
    return f"rows-{key_digest(FORMAT, states, how)}"


def _stored_files(
    files: Sequence[Path], sources: Sequence[str], source: str, read: Reader, how: str | None
) -> pa.Table:
    """The rows of all files, memory-mapped."""

    def build(folder: Path) -> None:
        digest = hashlib.blake2b(repr((FORMAT, sorted({*map(kind_of, files)}), how)).encode(), digest_size=16)
        for file in files:
            with file.open("rb") as content:
                digest.update(file.suffix.encode() if is_compressed(file) else b"")
                digest.update(hashlib.file_digest(content, "blake2b").digest())
        starts = _write(
            folder / "rows.arrow",
            lambda: [read(file, name) for file, name in zip(files, sources, strict=True)],
            sources,
        )
        (folder / "facts.json").write_text(json.dumps({"content": digest.hexdigest(), "starts": starts}))

    folder = build_once(_name(files, sources, how), build)
    facts = json.loads((folder / "facts.json").read_text())
    parts = json.dumps([*zip(facts["starts"], sources, strict=True)]) if len(files) > 1 else "[]"
    table = _mapped(folder)
    metadata = {**(table.schema.metadata or {}), PARTS_KEY: parts.encode()}
    return with_content(named(table.replace_schema_metadata(metadata), source), facts["content"])


def of_arrow_files(table: pa.Table, files: Sequence[Path], *key: object) -> pa.Table:
    """A table that another library has memory-mapped, with a digest in its metadata. A small table is unchanged.

    The digest is that of the files' states, because reading all bytes of a data set takes long.

    Args:
        table: the rows.
        files: their Arrow files; none if the rows are in memory.
        key: which part of the files the table is.
    """
    if not files or table.nbytes <= IN_MEMORY:
        return table
    states, types = [_state_of(file) for file in files], str(table.schema.remove_metadata())
    return with_content(table, key_digest(FORMAT, states, types, *key))


def filtered(table: pa.Table, kept: Callable[[int, pa.Table], NDArray[np.bool_]], *key: object) -> pa.Table:
    """The rows of a memory-mapped table for which `kept` is True, memory-mapped, with their row numbers.

    Args:
        table: the rows.
        kept: called with the number of the first row of a block in the table, and the block.
        key: identifies the selection, together with the content of the table.
    """
    content = key_digest(FORMAT, content_of(table), *key)

    def blocks() -> Iterator[pa.Table]:
        first = 0
        for block in blocks_of(table):
            yield block.filter(pa.array(kept(first, block)))
            first += block.num_rows

    def build(folder: Path) -> None:
        _write(folder / "rows.arrow", lambda: [blocks()], [""])

    folder = build_once(f"rows-{content}", build)
    schema = numbered(table.slice(0, 0)).schema  # types of columns may have been decided since the file was written
    return with_content(pa.Table.from_arrays(_mapped(folder).columns, schema=schema), content)


def converted(
    table: pa.Table, convert: Callable[[pa.Table], tuple[pa.Table, int]], *key: object
) -> tuple[pa.Table, int]:
    """The rows that `convert` makes from a memory-mapped table, memory-mapped, and the sum of its counts.

    Args:
        table: the rows.
        convert: called with each block of the table, which has row numbers; returns rows and a count.
        key: identifies the conversion, together with the content of the table.
    """
    content = key_digest(FORMAT, content_of(table), *key)

    def build(folder: Path) -> None:
        counts = []

        def blocks() -> Iterator[pa.Table]:
            for block in blocks_of(table):
                made, count = convert(block)
                counts.append(count)
                yield made

        _write(folder / "rows.arrow", lambda: [blocks()], [""])
        (folder / "count.json").write_text(json.dumps(sum(counts)))

    folder = build_once(f"rows-{content}", build)
    made = _mapped(folder).replace_schema_metadata(table.schema.metadata)
    return with_content(made, content), json.loads((folder / "count.json").read_text())


def _write(path: Path, read: Callable[[], Iterable[Blocks]], sources: Sequence[str]) -> list[int]:
    """Write the blocks of all sources into an Arrow file; return the number of the first row of each source.

    If blocks have different types, all are read a second time, and converted to the types that fit all of them.

    Raises:
        UserError: no type fits two blocks, or two sources have different columns.
    """
    schema: pa.Schema | None = None
    complete = False
    while not complete:
        complete, starts, rows, names = True, [], 0, None
        with pa.OSFile(str(path), "wb") as file, ExitStack() as stack:
            writer = None
            for blocks, source in zip(read(), sources, strict=True):
                starts.append(rows)
                found: dict[str, None] = {}
                for block in map(_without_dictionaries, blocks):
                    wider = block.schema if schema is None else _wider(schema, block.schema, source, sources[0])
                    if writer is None:
                        writer = stack.enter_context(pa.ipc.new_file(file, wider))
                    elif wider != schema:
                        complete = False  # from here on, only the types are collected
                    schema = wider
                    if complete:
                        whole = [schema.empty_table(), block]
                        writer.write_table(pa.concat_tables(whole, promote_options="permissive"))
                    rows += block.num_rows
                    found |= dict.fromkeys(block.column_names)
                names = names or [*found]
                refuse_other_columns([*found], names, source, sources[0])
    return starts


def _wider(schema: pa.Schema, other: pa.Schema, source: str, first: str) -> pa.Schema:
    """The schema whose types fit the values of both; UserError if there is none."""
    try:
        return pa.unify_schemas([schema, other], promote_options="permissive")
    except pa.ArrowException as error:
        problem = "is malformed" if source == first else f"has columns of other types than {first}"
        raise UserError(f"{source} {problem}: {readers.first_line(error)}") from None


def _without_dictionaries(block: pa.Table) -> pa.Table:
    """The block with plain columns: an Arrow file has one dictionary per column, but each block its own."""
    for place, field in enumerate(block.schema):
        if pa.types.is_dictionary(field.type):
            plain = field.type.value_type
            block = block.set_column(place, field.with_type(plain), block[field.name].cast(plain))
    return block


def _state_of(file: Path) -> tuple[str, int, int, int, int]:
    """The path, inode, size and times of a file: st_ctime, too, because rsync -t and cp -p restore only st_mtime."""
    status = file.stat()
    return str(file.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _mapped(folder: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow"))).read_all()
