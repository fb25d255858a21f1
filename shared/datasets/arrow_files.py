"""Tables of files: memory-mapped Arrow files of the cache folder.

The first process of a machine writes an Arrow file, block by block, and all processes map it. A table that is not small
has a digest of its rows in its metadata (`rows.content_of`), so that whatever is made from it can be found in the cache
without reading the rows. A selection of its rows is such a table, too. What is made from a small table is in memory.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.cache.prepared import build_once, key_digest
from shared.datasets.readers import is_compressed, kind_of, opened
from shared.datasets.rows import PARTS_KEY, blocks_of, content_of, named, numbered, with_content
from shared.errors import UserError, about

FORMAT = 2  # part of the cache's names: increase it when the files for the same input change
ROWS = "rows.arrow"  # the file in a folder of the cache
IN_MEMORY = 1 << 24  # maximum number of bytes of a small table

Blocks = Iterable[pa.Table]
Reader = Callable[[Path, str], Blocks]  # reader(file, source): the rows of a file
Chosen = Callable[[int, pa.Table], NDArray[np.bool_]]  # of the first row of a block in its table, and the block


def load(files: Sequence[Path], flag: str, source: str, read: Reader, how: str = "") -> pa.Table:
    """The rows of all files, as one memory-mapped table with the source `source`.

    Args:
        files: of kinds that the reader knows.
        flag: the flag that names them.
        source: see `rows.named`.
        read: the reader.
        how: everything but the files that the rows depend on.

    Raises:
        UserError: a file cannot be read, or two of them have different columns or types; names `flag`.
    """
    sources = [f"{flag} {file}" for file in files]
    source = source if len(files) > 1 else sources[0]
    states = []
    for file, name in zip(files, sources, strict=True):
        with opened(file, name):
            states.append(state_of(file))
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


def filtered(table: pa.Table, kept: Chosen, *key: object) -> pa.Table:
    """The rows for which `kept` is True, with their row numbers; memory-mapped if the table is.

    Args:
        table: the rows.
        kept: called with each block of the table.
        key: identifies the selection, together with the content of the table.
    """
    first = 0

    def keep(block: pa.Table) -> pa.Table:
        nonlocal first
        first += block.num_rows
        # `filter` instead of `take`, which joins the chunks of a column and overflows with more than 2 GiB of text.
        return block.filter(pa.array(kept(first - block.num_rows, block)))

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
    content = key_digest(FORMAT, "without a count", content_of(table), *key)  # older versions also read a count

    def build(folder: Path) -> None:
        _write(folder, lambda: [map(convert, blocks_of(table))], [""])

    made = _mapped(build_once(f"rows-{content}", build))
    return with_content(made.replace_schema_metadata(table.schema.metadata), content)


def _write(
    folder: Path, read_all: Callable[[], Sequence[Blocks]], sources: Sequence[str], schema: pa.Schema | None = None
) -> list[int]:
    """Write the blocks of all sources into an Arrow file; return the number of the first row of each source.

    If blocks have different types, all are read a second time, and converted to the types that fit all of them.

    Raises:
        UserError: no type fits two blocks, or two sources have different columns.
    """
    starts: list[int] = []
    names: set[str] = set()
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
                    writer.write_table(pa.concat_tables([schema.empty_table(), block], promote_options="permissive"))
                rows += block.num_rows
                found |= {*block.column_names}
            names = names or found
            if found != names:
                raise UserError(
                    f"{source} has other columns than {sources[0]}: only one of them has "
                    f"{', '.join(sorted(found ^ names))}"
                )
    return starts if wider == schema else _write(folder, read_all, sources, wider)


def state_of(file: Path) -> tuple[str, int, int, int, int]:
    """The path, inode, size and times of a file: st_ctime, too, because rsync -t and cp -p restore only st_mtime."""
    status = file.stat()
    return str(file.resolve()), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _mapped(folder: Path) -> pa.Table:
    return pa.ipc.open_file(pa.memory_map(str(folder / ROWS))).read_all()
