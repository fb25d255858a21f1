"""Reading a CSV, TSV, JSON, JSON lines or Parquet file as an Arrow table, and text line by line.

Errors name the malformed line.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from shared.datasets.files import kind_of, opened
from shared.datasets.rows import as_written, say
from shared.errors import UserError

KINDS = (".csv", ".tsv", ".json", ".jsonl", ".parquet")
BLOCK_BYTES = 1 << 24  # block size of Arrow's readers, which cannot read a longer row
TOO_LONG = f"is longer than {BLOCK_BYTES >> 20} MiB; is a closing quotation mark missing?"
SEPARATORS = (",", ";", "\t", "|")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def read(path: Path, source: str, csv_delimiter: str | None = None) -> pa.Table:
    """The rows of a file. The columns of a CSV file are untyped text: see `rows.as_written`.

    Raises:
        UserError: it cannot be read, is malformed or has no rows; the message begins with `source`.
    """
    kind = kind_of(path)
    with opened(path, source) as file:
        data = file.read()
    if not data or data.isspace():
        raise UserError(f"{source} is empty")
    try:
        if kind == ".parquet":
            table = read_parquet(pa.BufferReader(data))
            table.validate(full=True)  # the Parquet reader does not check that text is UTF-8
        elif kind in (".csv", ".tsv"):
            table = _read_separated(data, source, separator_of(kind, csv_delimiter))
        else:
            table = _read_json(data, source)
    except pa.ArrowException as error:
        raise UserError(f"{source} is malformed: {first_line(error)}") from None
    if table.num_rows == 0:
        raise UserError(f"{source} has no rows")
    refuse_repeated(table.column_names, source)
    return table


def read_parquet(file: Any) -> pa.Table:
    """Read like `pyarrow.parquet.read_table`, but without importing pyarrow.dataset and pandas, which takes 0.3 s."""
    return pyarrow.parquet.ParquetFile(file).read()


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


def _read_separated(data: bytes, source: str, separator: str) -> pa.Table:
    refuse_non_utf8(data, source)
    options = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    texts = pyarrow.csv.ConvertOptions(default_column_type=pa.string())

    def read(use_threads: bool) -> pa.Table:
        blocks = pyarrow.csv.ReadOptions(use_threads=use_threads, block_size=BLOCK_BYTES)
        return pyarrow.csv.read_csv(pa.BufferReader(data), blocks, options, texts)

    refuse_other_separator(data[:BLOCK_BYTES], separator, source)
    try:
        table = read(use_threads=True)
    except pa.ArrowInvalid:
        table = read(use_threads=False)  # also fails, but its error names the row
    if b'"' in data and data.count(b"\n") > table.num_rows + 1:
        check_quotes(io.BytesIO(data), separator, source)
    return as_written(table)


# JSON


def _read_json(data: bytes, source: str) -> pa.Table:
    refuse_non_utf8(data, source)
    unit = "line"
    if re.match(rb"(\xef\xbb\xbf)?\s*\[", data):
        data, unit = _array_to_lines(data, source), "element"
    try:
        table = _parse_json(data)
    except pa.ArrowInvalid as error:
        if whole := why_not_rows(data):
            raise UserError(f"{source} {whole}") from None
        for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
            try:
                reason = why_no_row(json.loads(line)) if line.strip() else None
            except ValueError as broken:
                reason = why_no_json(broken)
            if reason:
                raise UserError(f"{source} is malformed in {unit} {number:,}: {reason}") from None
        # Each line is valid by itself, but two of them disagree. Arrow's row number is dropped: it counts in a block.
        raise UserError(f"{source} is malformed: {re.sub(r' in row [0-9]+$', '', first_line(error))}") from None
    if table.num_rows == 1 and (whole := why_not_rows(data)):
        raise UserError(f"{source} {whole}")
    return table


def _parse_json(data: bytes) -> pa.Table:
    """The rows of JSON lines. Texts that look like dates stay texts."""
    blocks = pyarrow.json.ReadOptions(block_size=BLOCK_BYTES)
    table = pyarrow.json.read_json(pa.BufferReader(data), blocks)
    dates = [field.name for field in table.schema if pa.types.is_temporal(field.type)]
    if not dates:
        return table
    texts = pa.schema([(name, pa.string()) for name in dates])
    names = table.column_names
    return pyarrow.json.read_json(
        pa.BufferReader(data), blocks, pyarrow.json.ParseOptions(explicit_schema=texts)
    ).select(names)


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


def _array_to_lines(data: bytes, source: str) -> bytes:
    """A JSON array as JSON lines, so that the same reader infers the types of both."""
    try:
        rows = json.loads(data)
    except ValueError as error:
        raise UserError(f"{source} is malformed: {first_line(error)}") from None
    if not rows:
        raise UserError(f"{source} has no rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{source} is malformed: element {number:,} of the array is not an object")
    return "\n".join(map(json.dumps, rows)).encode()


def refuse_non_utf8(data: bytes, source: str) -> None:
    """Raise UserError if `data` is not UTF-8 text: Arrow would read other text as a column of bytes."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{source} is UTF-16, not UTF-8: convert it with iconv -f UTF-16 -t UTF-8")
    if (zero := data.find(b"\0")) >= 0:
        raise UserError(f"{source} is not text (byte {zero:,} is zero): use a text file, or correct its extension")
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), BLOCK_BYTES):  # in blocks: a str of the whole data needs up to 4 times the memory
        pending = len(decoder.getstate()[0])  # bytes of a character that the previous block cut off
        try:
            decoder.decode(data[start : start + BLOCK_BYTES], final=start + BLOCK_BYTES >= len(data))
        except UnicodeDecodeError as error:
            at = start - pending + error.start
            line = data.count(b"\n", 0, at) + 1
            raise UserError(
                f"{source} is not UTF-8 (byte {at:,}, line {line:,}): convert it, for instance with "
                "iconv -f LATIN1 -t UTF-8"
            ) from None


def first_line(error: BaseException) -> str:
    """The first line of a library's error message, at most 200 characters."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "straddl" in line:  # Arrow's error for a row that does not fit into a block
        return f"a row {TOO_LONG}"
    return line if len(line) <= 200 else f"{line[:200]}…"


# Parts of a file


def lines(path: Path, source: str, within: range | None = None) -> Iterator[tuple[int, str]]:
    """The lines of a file, or those that begin at the bytes `within`, each with the byte at which it begins.

    Raises:
        UserError: a line is not UTF-8; names the line.
    """
    with opened(path, source) as file:
        at = 0
        if within and within.start:
            file.seek(within.start - 1)
            at = within.start - 1 + len(file.readline())  # skips the line of the byte before `within`
        for line in file:
            if within is not None and at >= within.stop:
                return
            try:
                yield at, (line.removeprefix(codecs.BOM_UTF8) if at == 0 else line).decode()
            except UnicodeDecodeError:
                raise UserError(
                    f"{source} is not UTF-8 (line {line_number(path, source, at):,}): convert it, for instance with "
                    "iconv -f LATIN1 -t UTF-8"
                ) from None
            at += len(line)


def line_number(path: Path, source: str, at: int) -> int:
    """The number, from 1, of the line that begins at byte `at` of a file's decompressed content."""
    with opened(path, source) as file:
        blocks = (file.read(min(BLOCK_BYTES, at - start)) for start in range(0, at, BLOCK_BYTES))
        return 1 + sum(block.count(b"\n") for block in blocks)


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
