"""Finding the files that a flag names, and reading them block by block: as lines, or as Arrow tables."""

import bz2
import codecs
import csv
import glob
import gzip
import io
import json
import lzma
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from shared.errors import UserError, about

KINDS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")  # of tables
TEXT_FILES = (".txt", ".text", ".md")  # of documents
AS_WRITTEN = b"accelerate_recipes.as_written"  # in the metadata of a CSV file's columns: how they are read, or b""
ARRAY_ROWS = 1 << 12  # of a JSON array that become a block
BLOCK_BYTES = 1 << 22  # that are read at once, and the maximum length of a row of a CSV file
COMPRESSIONS: dict[str, Callable[[Any], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda file: io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(file), "zstd")),
}


def kind_of(path: Path) -> str:
    """The extension without compression, in lower case: ".csv" for reviews.CSV and for reviews.csv.gz."""
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


def is_compressed(path: Path) -> bool:
    """Whether a file's extension is that of a compression format."""
    return path.suffix.lower() in COMPRESSIONS


def find_files(given: Sequence[str], flag: str, kinds: Sequence[str], csv_delimiter: str | None = None) -> list[Path]:
    """The files that `given` (files, patterns such as data/*.csv, folders) names, sorted by name.

    The order of `given` is ignored, because a shell that expands a pattern chooses an order of its own. From a folder,
    the files of known `kinds` are used, except hidden files and subfolders.

    Raises:
        UserError: a folder or pattern has no files, a file is named twice, its kind is unknown, or --csv_delimiter has
            no effect.
    """
    by_content: dict[Path, Path] = {}
    for path in chain.from_iterable(_named_by(name, flag, kinds) for name in given):
        if kind_of(path) not in kinds:
            known = f"{', '.join(kinds)}, optionally compressed ({', '.join(COMPRESSIONS)})"
            raise UserError(f"{flag} {path}: unknown kind of file: use {known}")
        content = path.resolve().with_suffix("") if is_compressed(path) else path.resolve()
        if (same := by_content.setdefault(content, path)) is not path:
            raise UserError(f"{flag} {path} and {same} are the same data: name each file once")
    found = sorted(by_content.values(), key=str)
    separated = {".csv", ".tsv"} if ".csv" in kinds else set()  # a .tsv file of tagged words is one of CoNLL
    added = flag in ("--validation_file", "--corpus_file", "FILE")  # the delimiter is that of --train_file
    if csv_delimiter is not None and not added and separated.isdisjoint(map(kind_of, found)):
        raise UserError(f"--csv_delimiter {csv_delimiter} has no effect on {flag} {found[0]}: remove it")
    return found


def _named_by(name: str, flag: str, kinds: Sequence[str]) -> list[Path]:
    """The files that a path, a pattern or a folder names."""
    path, source = Path(name), f"{flag} {name}"
    if os.path.isdir(path):  # noqa: PTH112  Path.is_dir raises where the folder cannot be read
        if (path / "dataset_dict.json").exists() or (path / "dataset_info.json").exists():
            raise UserError(f"{source} is a folder that save_to_disk wrote: use it as --dataset_name")
        with about(source):
            files = [file for file in path.iterdir() if file.is_file() and file.name[0] not in "._"]
        files = [file for file in files if kind_of(file) in kinds]
        if len(found := sorted({*map(kind_of, files)})) > 1:
            raise UserError(f"{source}: files of several kinds ({', '.join(found)}): select one, such as '*{found[0]}'")
    elif glob.has_magic(name) and not os.path.exists(path):  # noqa: PTH110
        matches = glob.glob(name, recursive=True)  # noqa: PTH207  Path.glob refuses absolute patterns
        files = [Path(match) for match in matches if Path(match).is_file()]
    else:
        return [path]
    if not files:
        raise UserError(f"{source}: no such file ({', '.join(kinds)})")
    return files


@contextmanager
def opened(path: Path, source: str) -> Iterator[BinaryIO]:
    """Open a file to read its decompressed bytes; the block should do nothing but read.

    Raises:
        UserError: the file or its content cannot be read; the message begins with `source`.
    """
    with about(source):
        if not path.exists():
            raise UserError(f"{source}: no such file")
        with path.open("rb") as file:
            yield COMPRESSIONS[path.suffix.lower()](file) if is_compressed(path) else file


def blocks_of_lines(path: Path, source: str) -> Iterator[tuple[int, bytes]]:
    """Whole lines of a text file, in blocks of about BLOCK_BYTES, each with the byte at which it begins.

    Raises:
        UserError: a line is not UTF-8; the message begins with `source` and names the line.
    """
    at = 0
    with opened(path, source) as file:
        while block := file.read(BLOCK_BYTES):
            if not block.endswith(b"\n"):
                block += file.readline()
            try:
                block.decode()
            except UnicodeDecodeError as error:
                line = line_number(path, source, at + error.start)
                name = "UTF-16" if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "LATIN1"
                raise UserError(
                    f"{source} is not UTF-8 (line {line:,}): convert it, for instance with iconv -f {name} -t UTF-8"
                ) from None
            yield at, block if at else block.removeprefix(codecs.BOM_UTF8)
            at += len(block)


def lines_of_text(block: bytes) -> pa.Array:
    """The lines of a block, without their ends."""
    text = pa.array([block.decode().removesuffix("\n")], pa.large_string())
    return pc.utf8_rtrim(pc.split_pattern(text, "\n").flatten(), "\r")


def line_number(path: Path, source: str, at: int) -> int:
    """The number, from 1, of the line with the byte `at` of a file's decompressed content."""
    with opened(path, source) as file:
        blocks = (file.read(min(BLOCK_BYTES, at - start)) for start in range(0, at, BLOCK_BYTES))
        return 1 + sum(block.count(b"\n") for block in blocks)


def blocks(path: Path, source: str, csv_delimiter: str | None = None, column: str | None = None) -> Iterator[pa.Table]:
    """The rows of a file, in tables of about BLOCK_BYTES; only a JSON array is in memory as a whole.

    The rows of a text file are its lines, in the column text.
    The columns of a CSV file are untyped text: see `rows.reading_of`. The types and columns of a JSON file are those
    of the rows in a block, so they may differ between blocks.

    Args:
        path: of the file.
        source: its name in messages.
        csv_delimiter: --csv_delimiter.
        column: a column of text; others need not be read, and in a JSON file their rows may have different types.

    Raises:
        UserError: the file cannot be read, is malformed or has no rows; the message begins with `source`.
    """
    kind, rows = kind_of(path), 0
    if kind == ".parquet":
        found = _parquet_blocks(path, source, column)
    elif kind in TEXT_FILES:
        found = (pa.table({"text": lines_of_text(block)}) for _, block in blocks_of_lines(path, source))
    elif kind in (".csv", ".tsv"):
        separator = csv_delimiter or ("\t" if kind == ".tsv" else ",")
        found = _csv_blocks(path, source, separator.replace(r"\t", "\t"))
    else:
        found = _json_blocks(path, source, column)
    with about(source):
        for table in found:
            if repeated := {name for name in table.column_names if table.column_names.count(name) > 1}:
                raise UserError(f"{source} has two columns with the name {min(repeated)}: rename one")
            rows += table.num_rows
            yield table
    if not rows:
        raise UserError(f"{source} has no rows")


def _parquet_blocks(path: Path, source: str, column: str | None) -> Iterator[pa.Table]:
    """The row groups of a Parquet file, each in blocks of about BLOCK_BYTES."""
    with opened(path, source) as content:
        # Parquet is read from its end, so a compressed file must be in memory.
        file = pa.BufferReader(content.read()) if is_compressed(path) else path
        with pyarrow.parquet.ParquetFile(file, memory_map=True) as parquet:
            schema = parquet.schema_arrow
            if column in schema.names:
                schema = pa.schema([schema.field(column)], schema.metadata)
            plain = with_plain_types(schema)
            for number in range(parquet.num_row_groups):
                group = parquet.metadata.row_group(number)
                at_once = group.num_rows * BLOCK_BYTES // max(group.total_byte_size, BLOCK_BYTES)
                for batch in parquet.iter_batches(max(1, at_once), row_groups=[number], columns=schema.names):
                    batch.validate(full=True)  # the Parquet reader does not check that text is UTF-8
                    table = pa.Table.from_batches([batch]).replace_schema_metadata(schema.metadata)
                    yield table.cast(plain)


def with_plain_types(schema: pa.Schema) -> pa.Schema:
    """The schema without dictionaries, of which each block has its own, and views, of which no rows can be selected."""

    def plain(type_: pa.DataType) -> pa.DataType:
        if pa.types.is_dictionary(type_):
            return changed(type_.value_type, plain)
        return {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(type_, type_)

    return pa.schema([field.with_type(changed(field.type, plain)) for field in schema], schema.metadata)


def is_list(type_: pa.DataType) -> bool:
    """Whether an Arrow type is a list."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def changed(type_: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The result of `change` for a type; lists, maps and structs are kept, and their contents changed."""
    if is_list(type_):
        values = type_.value_field.with_type(changed(type_.value_type, change))
        is_large = pa.types.is_large_list(type_)
        return pa.large_list(values) if is_large else pa.list_(values, getattr(type_, "list_size", -1))
    if pa.types.is_map(type_):
        return pa.map_(*(field.with_type(changed(field.type, change)) for field in (type_.key_field, type_.item_field)))
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(changed(field.type, change)) for field in type_])
    return change(type_)


# CSV


def _csv_blocks(path: Path, source: str, separator: str) -> Iterator[pa.Table]:
    sizes = pyarrow.csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    parse = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    texts = pyarrow.csv.ConvertOptions(default_column_type=pa.string())
    several_lines = False
    with opened(path, source) as file:
        header = file.readline().decode(errors="replace").strip()
    if separator not in header and any(other in header for other in ",;\t|"):
        raise UserError(f"{source} has no {separator!r} in its first line, {header!r:.80}: see --csv_delimiter")
    try:
        with opened(path, source) as file, pyarrow.csv.open_csv(file, sizes, parse, texts) as reader:
            undecided = pa.schema([field.with_metadata({AS_WRITTEN: b""}) for field in reader.schema])
            for batch in reader:
                several_lines |= any(pc.any(pc.match_substring(column, "\n")).as_py() for column in batch.columns)
                yield pa.Table.from_batches([batch]).cast(undecided)
    except UserError:
        deque(blocks_of_lines(path, source), 0)  # names the line if the file is not UTF-8
        raise
    if several_lines:
        refuse_swallowed_rows(path, source, separator)


def refuse_swallowed_rows(path: Path, source: str, separator: str) -> None:
    """Refuse quotation marks that turn several rows of a CSV file into one.

    A quoted field may contain line breaks, but must end with its closing mark. Prints a warning if the lines inside
    such a field look like rows.

    Raises:
        UserError: the closing mark is in the middle of another field, or a field of a tab-separated file contains lines
            with tabs; names the lines.
    """
    csv.field_size_limit(max(BLOCK_BYTES, csv.field_size_limit()))
    begin, columns, likely = 1, 0, range(0)
    with opened(path, source) as file:
        rows = csv.reader(io.TextIOWrapper(file, "utf-8-sig", newline=""), delimiter=separator, strict=True)
        while True:
            try:
                fields = next(rows, None)
            except csv.Error:
                fields = []
            if fields is None:
                break
            lines, begin = range(begin, rows.line_num), rows.line_num + 1
            columns = columns or len(fields)
            inner = max((field.splitlines()[1:-1] for field in fields), key=len, default=[])
            is_rows = bool(inner) and columns > 1 and all(line.count(separator) == columns - 1 for line in inner)
            if lines and (not fields or (is_rows and separator == "\t")):
                raise UserError(
                    f"{source} is malformed: the quotation mark in line {lines.start:,} is closed inside of line "
                    f"{lines.stop:,}, so these lines would be read as one row: remove both marks, or double them"
                )
            if is_rows and len(lines) > len(likely):
                likely = lines
    if likely:
        print(  # by any process: only one reads the file
            f"{source}: the quoted field that begins in line {likely.start:,} continues to line {likely.stop:,} and "
            "contains lines that look like rows: if they are, add the missing quotation mark or remove the extra one",
            file=sys.stderr,
        )


# JSON


def _json_blocks(path: Path, source: str, column: str | None) -> Iterator[pa.Table]:
    lines = ((at, block) for at, block in blocks_of_lines(path, source) if not block.isspace())
    start = next(lines, (0, b""))
    if start[1].lstrip().startswith(b"["):
        with opened(path, source) as file:
            elements = json.loads(file.read())
        for first in range(0, len(elements), ARRAY_ROWS):
            yield _parse_json("\n".join(map(json.dumps, elements[first : first + ARRAY_ROWS])).encode(), column)
        return
    for at, block in chain([start] if start[1] else [], lines):
        try:
            yield _parse_json(block, column)
        except pa.ArrowInvalid as error:
            first = line_number(path, source, at)
            for number, line in enumerate(block.split(b"\n"), first):
                with about(f"{source} is malformed in line {number:,}"):
                    json.loads(line.strip() or b"{}")
            raise UserError(f"{source} is malformed in line {first:,} or later: {error}") from None


def _parse_json(data: bytes, column: str | None) -> pa.Table:
    """The rows of JSON lines. Texts that look like dates stay texts. If no row has a text in `column`, all columns."""

    def no_date(type_: pa.DataType) -> pa.DataType:
        return pa.string() if pa.types.is_temporal(type_) else type_

    if data.lstrip().startswith(b"null"):
        raise pa.ArrowInvalid("a row is null")  # pyarrow 26 crashes if that is the first one of a block
    read = partial(pyarrow.json.read_json, read_options=pyarrow.json.ReadOptions(block_size=len(data)))
    if column is not None:
        only = pyarrow.json.ParseOptions(pa.schema([(column, pa.string())]), unexpected_field_behavior="ignore")
        found = read(pa.BufferReader(data), parse_options=only)
        if found[column].null_count < len(found):
            return found
    table = read(pa.BufferReader(data))
    schema = pa.schema([field.with_type(changed(field.type, no_date)) for field in table.schema])
    try:
        table.validate()
    except pa.ArrowException:  # pyarrow 26 loses the nulls in lists before the first value of all lists
        return pa.Table.from_pylist([json.loads(line) for line in data.splitlines() if line.strip()], schema)
    if table.schema == schema:
        return table
    return read(pa.BufferReader(data), parse_options=pyarrow.json.ParseOptions(explicit_schema=schema))
