"""Reading a CSV, TSV, JSON, JSON lines or Parquet file as Arrow tables, block by block.

Errors name the malformed line.
"""

import codecs
import csv
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from shared.cache.prepared import cache_dir
from shared.datasets.files import CheckedText, is_compressed, kind_of, opened
from shared.datasets.rows import as_written
from shared.errors import UserError, say

KINDS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
BLOCK_BYTES = 1 << 24  # size of the blocks in which a file is read, and the maximum length of a row
LARGEST_OBJECT = 1 << 28  # bytes of a JSON file that are read to describe an error
TOO_LONG = f"is longer than {BLOCK_BYTES >> 20} MiB; is a closing quotation mark missing?"
STRADDLING = "straddl"  # a word in Arrow's error for a row that does not fit into a block
SEPARATORS = (",", ";", "\t", "|")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def blocks(path: Path, source: str, csv_delimiter: str | None = None) -> Iterator[pa.Table]:
    """The rows of a file, in tables of about BLOCK_BYTES; the whole file is never in memory.

    The columns of a CSV file are untyped text: see `rows.as_written`. The types and columns of a JSON file are those
    of the rows in a block, so they may differ between blocks.

    Raises:
        UserError: the file cannot be read, is malformed or has no rows; the message begins with `source`.
    """
    kind = kind_of(path)
    with opened(path, source) as file:
        while (start := file.read(BLOCK_BYTES)).isspace():
            pass
        if not start:
            raise UserError(f"{source} is empty")
    del start
    if kind == ".parquet":
        found = _parquet_blocks(path, source)
    elif kind in (".csv", ".tsv"):
        found = _separated_blocks(path, source, separator_of(kind, csv_delimiter))
    else:
        found = _json_blocks(path, source)
    rows = 0
    try:
        for table in found:
            if not rows:
                refuse_repeated(table.column_names, source)
            rows += table.num_rows
            yield table
    except pa.ArrowException as error:
        raise UserError(f"{source} is malformed: {first_line(error)}") from None
    if not rows:
        raise UserError(f"{source} has no rows")


def _parquet_blocks(path: Path, source: str) -> Iterator[pa.Table]:
    with opened(path, source) as content:
        if not is_compressed(path):
            yield from _row_groups(path)
            return
        # Parquet is read from its end, so a compressed file is decompressed to disk first.
        cache_dir().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache_dir()) as plain:
            shutil.copyfileobj(content, plain, BLOCK_BYTES)
            yield from _row_groups(plain)


def _row_groups(file: Any) -> Iterator[pa.Table]:
    """The row groups of a Parquet file, each in blocks of about BLOCK_BYTES."""
    with pyarrow.parquet.ParquetFile(file, memory_map=True) as parquet:
        schema = parquet.schema_arrow
        for number in range(parquet.num_row_groups):
            group = parquet.metadata.row_group(number)
            at_once = max(1, group.num_rows * BLOCK_BYTES // max(group.total_byte_size, BLOCK_BYTES))
            for batch in parquet.iter_batches(at_once, row_groups=[number]):
                batch.validate(full=True)  # the Parquet reader does not check that text is UTF-8
                yield pa.Table.from_batches([batch]).replace_schema_metadata(schema.metadata)


def refuse_repeated(names: list[str], source: str) -> None:
    """Raise UserError if two columns have the same name."""
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{source} has two columns with the name {min(repeated)}: rename one")


# CSV


def separator_of(kind: str, csv_delimiter: str | None) -> str:
    """The character that separates the columns of a .csv or .tsv file."""
    if csv_delimiter is not None:
        return "\t" if csv_delimiter == r"\t" else csv_delimiter
    return "\t" if kind == ".tsv" else ","


def refuse_other_separator(head: bytes, separator: str, source: str) -> None:
    """Raise UserError if the header, the first line of `head`, contains another common separator, but not this one."""
    header = head.removeprefix(codecs.BOM_UTF8).split(b"\n")[0].decode(errors="replace")
    others = [other for other in SEPARATORS if other in header and other != separator]
    if separator not in header and others:
        common = max(others, key=header.count)
        flag = {"\t": r"'\t'", ",": ","}.get(common, f"'{common}'")
        raise UserError(
            f"{source} has no {separator!r} in its header, but {common!r} (first line: {header.strip()!r:.80}): "
            f"use --csv_delimiter {flag}"
        )


def check_quotes(file: BinaryIO, separator: str, source: str) -> None:
    """Check a whole file for wrong quotation marks that turn several rows into one.

    A quoted field may contain line breaks, but must end with its closing mark. Prints a warning if such a field looks
    like rows.

    Raises:
        UserError: the closing mark of a field with line breaks is in the middle of another field, or such a field in a
            tab-separated file contains tabs, or a field is longer than BLOCK_BYTES; names the lines.
    """
    lines = io.TextIOWrapper(file, "utf-8-sig", errors="replace", newline="")
    limit = csv.field_size_limit(BLOCK_BYTES)  # without one, a missing mark reads the rest of the file into memory
    rows = csv.reader(lines, delimiter=separator, strict=True)
    begin, columns, likely = 1, 0, []
    try:
        while True:
            problem, fields = "", []
            try:
                fields = next(rows)
            except StopIteration:
                break
            except csv.Error as error:
                if "field limit" in str(error):
                    raise UserError(f"{source} is malformed: the row from line {begin:,} {TOO_LONG}") from None
                problem = "and closed in the middle of a field"
            end, lines_in = rows.line_num, [field.splitlines()[1:-1] for field in fields if "\n" in field]
            columns = columns or len(fields)
            if separator == "\t" and any("\t" in field and "\n" in field for field in fields):
                problem = "and closed after other fields"
            if problem and end > begin:
                raise UserError(
                    f"{source} is malformed: a quotation mark is opened in line {begin:,} {problem} in line {end:,}, "
                    "so these lines would be read as one row: remove both marks, or double them inside a quoted field"
                )
            inner = max(lines_in, key=len, default=[])
            if inner and columns > 1 and all(line.count(separator) == columns - 1 for line in inner):
                likely.append((begin, end))
            begin = end + 1
    finally:
        csv.field_size_limit(limit)
        lines.detach()
    if likely:
        begin, end = max(likely, key=lambda span: span[1] - span[0])
        say(
            f"{source}: the quoted field that begins in line {begin:,} continues to line {end:,} and contains lines "
            "that look like rows: if they are rows, add the missing quotation mark or remove the extra one"
        )


def _separated_blocks(path: Path, source: str, separator: str) -> Iterator[pa.Table]:
    with opened(path, source) as file:
        refuse_other_separator(CheckedText(file, source).read(BLOCK_BYTES), separator, source)
    parse = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    texts = pyarrow.csv.ConvertOptions(default_column_type=pa.string())
    rows = 0
    for block_bytes in (BLOCK_BYTES // 4, BLOCK_BYTES):  # Arrow reads 32 blocks ahead, and large ones only if it must
        sizes = pyarrow.csv.ReadOptions(use_threads=False, block_size=block_bytes)
        known = rows
        try:
            with opened(path, source) as file:
                text = CheckedText(file, source)
                with pyarrow.csv.open_csv(text, sizes, parse, texts) as reader:
                    for batch in reader:
                        new = batch.slice(min(known, batch.num_rows))
                        known -= batch.num_rows - new.num_rows
                        rows += new.num_rows
                        if new.num_rows:
                            yield as_written(pa.Table.from_batches([new]))
            break
        except pa.ArrowInvalid as error:
            if STRADDLING not in str(error) or block_bytes == BLOCK_BYTES:
                raise
    if text.quotes and text.lines > rows + 1:
        with opened(path, source) as file:
            check_quotes(file, separator, source)


# JSON


def _json_blocks(path: Path, source: str) -> Iterator[pa.Table]:
    rows = before = 0  # rows, and lines or elements of an array, in the blocks before
    with opened(path, source) as file:
        unit, texts = _json_lines(CheckedText(file, source), source)
        for data in texts:
            if not data.isspace():
                try:
                    table = _parse_json(data)
                except pa.ArrowInvalid as error:
                    raise _bad_json(error, path, source, unit, data, before) from None
                rows += table.num_rows
                only_row = data if rows == 1 else b""
                yield table
            before += data.count(b"\n")
    if rows == 1 and unit == "line" and (whole := why_not_rows(only_row)):
        raise UserError(f"{source} {whole}")


def _json_lines(text: CheckedText, source: str) -> tuple[str, Iterator[bytes]]:
    """What a line is, "line" or "element" of an array, and blocks of whole lines of about BLOCK_BYTES.

    An array becomes JSON lines, so that the same reader infers the types of both.
    """
    pieces = iter(lambda: text.read(BLOCK_BYTES), b"")
    first = next((piece for piece in pieces if not piece.isspace()), b"").removeprefix(codecs.BOM_UTF8)
    pieces = chain([first], pieces)
    if not first.lstrip().startswith(b"["):
        return "line", whole_lines(pieces, source)
    elements = (json.dumps(row).encode() + b"\n" for row in _array_elements(pieces, source))
    return "element", whole_lines(_in_pieces(elements), source)


def whole_lines(pieces: Iterator[bytes], source: str) -> Iterator[bytes]:
    """The same bytes in pieces of whole lines; UserError if a line is longer than BLOCK_BYTES."""
    rest = b""
    for piece in pieces:
        end = piece.rfind(b"\n") + 1
        if end:
            yield rest + piece[:end]
            rest = b""
        rest += piece[end:]
        if len(rest) > BLOCK_BYTES:
            raise UserError(f"{source} is malformed: a row {TOO_LONG}")
    if rest:
        yield rest


def _in_pieces(lines: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of about BLOCK_BYTES."""
    found, size = [], 0
    for line in lines:
        found.append(line)
        size += len(line)
        if size >= BLOCK_BYTES:
            yield b"".join(found)
            found, size = [], 0
    yield b"".join(found)


def _array_elements(pieces: Iterator[bytes], source: str) -> Iterator[dict[str, Any]]:
    """The elements of a JSON array, decoded one at a time.

    Raises:
        UserError: the array is malformed, or an element is not an object; names the element.
    """
    decode = codecs.getincrementaldecoder("utf-8")().decode
    scan, white_space = json.JSONDecoder().raw_decode, re.compile(r"[ \t\r\n]*")
    text, at, number = "", 0, 0

    def read_more() -> bool:
        nonlocal text, at
        more = decode(next(pieces, b""))
        text, at = text[at:] + more, 0
        return bool(more)

    def next_mark() -> str:
        """The next character that is not white space; "" at the end of the file. It is not consumed."""
        nonlocal at
        while True:
            found = white_space.match(text, at)
            at = found.end() if found else at
            if at < len(text) or not read_more():
                return text[at : at + 1]

    next_mark()
    at += 1  # the opening bracket
    mark = next_mark()
    while mark != "]":
        number += 1
        next_mark()
        while True:
            try:
                element, at = scan(text, at)
                break
            except json.JSONDecodeError as error:
                if len(text) - at > BLOCK_BYTES or not read_more():
                    raise UserError(f"{source} is malformed in element {number:,} of the array: {error.msg}") from None
        if not isinstance(element, dict):
            raise UserError(f"{source} is malformed: element {number:,} of the array is not an object")
        yield element
        mark = next_mark()
        if mark not in (",", "]"):
            raise UserError(f"{source} is malformed after element {number:,} of the array: Expecting ',' or ']'")
        at += mark == ","
    at += 1
    if next_mark():
        raise UserError(f"{source} is malformed: the file continues after the end of its array")


def _bad_json(error: pa.ArrowInvalid, path: Path, source: str, unit: str, data: bytes, before: int) -> UserError:
    """The error about a block `data` that Arrow cannot read, with `before` lines in the blocks before it."""
    if unit == "line" and not before:
        with opened(path, source) as file:
            if whole := why_not_rows(file.read(LARGEST_OBJECT)):
                return UserError(f"{source} {whole}")
    for number, line in enumerate(data.split(b"\n"), before + 1):
        try:
            reason = why_no_row(json.loads(line)) if line.strip() else None
        except ValueError as broken:
            reason = why_no_json(broken)
        if reason:
            return UserError(f"{source} is malformed in {unit} {number:,}: {reason}")
    # Each line is valid by itself, but two of them disagree. Arrow's row number is dropped: it counts in a block.
    return UserError(f"{source} is malformed: {re.sub(r' in row [0-9]+$', '', first_line(error))}")


def _parse_json(data: bytes) -> pa.Table:
    """The rows of JSON lines. Texts that look like dates stay texts."""
    one_block = pyarrow.json.ReadOptions(block_size=len(data))
    table = pyarrow.json.read_json(pa.BufferReader(data), one_block)
    texts = [pa.field(f.name, wanted) for f in table.schema if (wanted := _without_dates(f.type)) != f.type]
    if not texts:
        return table
    options = pyarrow.json.ParseOptions(explicit_schema=pa.schema(texts))
    return pyarrow.json.read_json(pa.BufferReader(data), one_block, options).select(table.column_names)


def _without_dates(type_: pa.DataType) -> pa.DataType:
    """The type with text in the place of dates, also in lists and structs."""
    if pa.types.is_list(type_):
        return pa.list_(_without_dates(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([pa.field(field.name, _without_dates(field.type)) for field in type_])
    return pa.string() if pa.types.is_temporal(type_) else type_


def why_no_json(error: ValueError) -> str:
    """Why a line is not JSON. Python's line number is dropped, because it counts within this line."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else first_line(error)


def why_no_row(value: Any) -> str | None:
    """Why a JSON value is not a row, or None."""
    if not isinstance(value, dict):
        return "not an object: write each row as {column: value, …} in a line"
    if half := LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        return f"it contains {half[0]!a}, a lone surrogate, which is half of a character: remove it"
    return None


def why_not_rows(data: bytes) -> str | None:
    """If the whole content of a JSON file is one object instead of rows: the problem and the fix. Otherwise None."""
    try:
        whole = json.loads(data)
    except ValueError:
        return None
    if not isinstance(whole, dict):
        return None
    for name, value in whole.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return f"is one object with {len(value):,} rows in {name!r}: save only this list in the file"
    if whole and all(isinstance(value, list | dict) for value in whole.values()):
        return "is one object of columns, not rows: write an object for each row (pandas: orient='records', lines=True)"
    return None


def first_line(error: BaseException) -> str:
    """The first line of a library's error message, at most 200 characters."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if STRADDLING in line:
        return f"a row {TOO_LONG}"
    return line if len(line) <= 200 else f"{line[:200]}…"


def row_groups(path: Path, most_bytes: int) -> list[tuple[range, int]]:
    """Ranges of row groups of a Parquet file with at most `most_bytes` uncompressed, or of one, with their bytes."""
    metadata = pyarrow.parquet.read_metadata(path)
    found: list[tuple[range, int]] = []
    for group in range(metadata.num_row_groups):
        size = metadata.row_group(group).total_byte_size
        if found and found[-1][1] + size <= most_bytes:
            found[-1] = range(found[-1][0].start, group + 1), found[-1][1] + size
        else:
            found.append((range(group, group + 1), size))
    return found
