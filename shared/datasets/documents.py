"""Documents for language modeling, read a few at a time, so that a corpus may be larger than memory.

Text files (one document per line), CSV, JSON lines and Parquet are streamed. Data sets of the Hub and of `save_to_disk`
are memory-mapped Arrow tables. The default is the embedded docstrings.
"""

import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from shared.cache.prepared import build_once
from shared.datasets.files import find_files, is_compressed, kind_of, line_number, lines, opened, refuse_unknown
from shared.datasets.readers import (
    LARGEST_OBJECT,
    LONE_SURROGATE,
    check_quotes,
    first_line,
    refuse_other_separator,
    refuse_repeated,
    row_groups,
    separator_of,
    why_no_json,
    why_no_row,
    why_not_rows,
)
from shared.datasets.rows import column_of, is_text, named, no_such_column, source_of
from shared.datasets.tables import read_dataset, read_file
from shared.errors import UserError
from shared.options.data_options import DataOptions

FLAG = "--text_column_name"
BATCH_DOCUMENTS = 1000
BLOCK_BYTES = 1 << 22  # size of the blocks in which a file is read, and the maximum length of a row
PART_BYTES = 1 << 25  # of a part of a file; changing it prepares all data again
PART_ROWS = 1 << 15  # of a part of a table
PART_BATCH = 100  # documents of a part that are read at once
COMPRESSION = 4  # assumed size of the content of a compressed file, relative to the file
TEXT_FILES = (".txt", ".text", ".md")
STREAMED = (*TEXT_FILES, ".csv", ".tsv", ".jsonl", ".json", ".parquet")

Batches = Iterator[list[str | None]]


@dataclass(frozen=True)
class Part:
    """Consecutive documents of a corpus that can be read without those before them."""

    content: str  # a digest of them and of the way they are read
    batches: Callable[[], Batches]  # yields lists of texts
    long: bool = False  # whether their text may be several times as long as PART_BYTES


@dataclass(frozen=True)
class Documents:
    """Texts that can be read from the start as often as needed."""

    source: str  # their name in messages: "--train_file corpus.txt"
    batches: Callable[[], Batches]  # yields lists of texts; None and white space are not documents
    parts: Callable[[], list[Part]]  # cuts them, in their order; may take as long as reading them once

    def content(self) -> str:
        """A digest of all texts and of the way they are read."""
        return digest_of_words(part.content for part in self.parts())


def load_documents(config: DataOptions, text_column_name: str) -> tuple[Documents, Documents | None]:
    """The training documents and, if the source has some, the validation documents, from the data flags of a config.

    Raises:
        UserError: the data does not exist or cannot be read, or a flag has no effect on it.
    """
    if config.skip_incomplete_rows:
        raise UserError(
            "--skip_incomplete_rows has no effect here: documents without text are always skipped: remove the flag"
        )
    if config.train_file:
        train = of_files(config.train_file, "--train_file", text_column_name, config.csv_delimiter)
        if config.validation_file is None:
            return train, None
        return train, of_files(config.validation_file, "--validation_file", text_column_name, config.csv_delimiter)
    if config.dataset_name:
        table, held_out = read_dataset(config)
        return of_table(table, text_column_name), held_out and of_table(held_out, text_column_name)
    from shared.datasets import demo_texts

    if text_column_name != "text":
        raise UserError(f"{FLAG} {text_column_name}: the embedded docstrings are in the column text: remove the flag")
    everything = demo_texts.documents()
    splits = everything["split"].to_pylist()
    both = [
        named(everything.filter(pa.array([split == part for split in splits])), f"the embedded docstrings ({part})")
        for part in ("train", "validation")
    ]
    return of_table(both[0], "text"), of_table(both[1], "text")


def of_table(table: pa.Table, column_name: str) -> Documents:
    """The texts in a column of an Arrow table.

    Raises:
        UserError: the column does not exist, or its type is not text.
    """
    column = column_of(table, column_name, FLAG, as_text=True)
    check_is_text(column.type, column_name, source_of(table))

    def batches(first: int = 0, rows: int = len(column)) -> Batches:
        for start in range(first, min(first + rows, len(column)), BATCH_DOCUMENTS):
            yield column.slice(start, min(BATCH_DOCUMENTS, first + rows - start)).to_pylist()

    @cache
    def parts() -> list[Part]:
        readers = [partial(batches, first, PART_ROWS) for first in range(0, len(column), PART_ROWS)]
        return [Part(digest_of(reader()), reader) for reader in readers]

    return Documents(source_of(table), batches, parts)


def of_files(given: Sequence[str], flag: str, column_name: str, csv_delimiter: str | None = None) -> Documents:
    """The texts of the files that `given` names (see `find_files`), in the order of the file names.

    Consecutive small files are one part of the corpus, and a large file has several.

    Raises:
        UserError: one of them cannot be read; names `flag`.
    """
    files = find_files(given, flag, STREAMED)
    if csv_delimiter is not None and not any(kind_of(file) in (".csv", ".tsv") for file in files):
        raise UserError(f"--csv_delimiter {csv_delimiter} has no effect on {flag} {files[0]}: remove it")
    found = [of_file(file, flag, column_name, csv_delimiter) for file in files]
    if len(found) == 1:
        return found[0]
    sizes = [file.stat().st_size * (COMPRESSION if is_compressed(file) else 1) for file in files]

    def batches() -> Batches:
        for each in found:
            yield from each.batches()

    @cache
    def parts() -> list[Part]:
        # Each process begins with another file, and finds the digests of those that the others have read.
        first = len(found) * int(os.environ.get("RANK", 0)) // int(os.environ.get("WORLD_SIZE", 1))
        for each in found[first:] + found[:first]:
            each.parts()
        groups = small_together(found, sizes)
        return [part for group in groups for part in (group[0].parts() if len(group) == 1 else [joined(group)])]

    return Documents(f"{flag} {' '.join(given)}", batches, parts)


def small_together(documents: Sequence[Documents], sizes: Sequence[int]) -> list[list[Documents]]:
    """Cut a list into groups of consecutive documents with at most PART_BYTES, or of one; `sizes` are in bytes."""
    groups: list[list[Documents]] = []
    room = -1
    for each, size in zip(documents, sizes, strict=True):
        if size > room:
            groups.append([])
            room = PART_BYTES
        groups[-1].append(each)
        room -= size
    return groups


def joined(documents: Sequence[Documents]) -> Part:
    """One part with the documents of several files."""
    parts = [part for each in documents for part in each.parts()]
    content = digest_of_words(part.content for part in parts)
    return Part(content, lambda: chain.from_iterable(part.batches() for part in parts))


def of_file(path: str | Path, flag: str, column_name: str, csv_delimiter: str | None = None) -> Documents:
    """The texts of a file: one document per line of a text file, or per row of another kind of file.

    The parts of a text or JSON lines file are ranges of its bytes, and those of a Parquet file are row groups. Other
    files have one part, because they can only be read from their start.

    Raises:
        UserError: the file does not exist, has an unknown kind, is empty, or lacks the column; names `flag`.
    """
    source, file = f"{flag} {path}", Path(path)
    kind = kind_of(file)
    refuse_unknown(file, source, STREAMED)
    with opened(file, source) as stream:
        head = stream.read(4096).removeprefix(codecs.BOM_UTF8)
        status = file.stat()
    if kind in TEXT_FILES and column_name != "text":
        raise UserError(f"{FLAG} {column_name}: {source} has lines and no columns: remove the flag")
    if not head:
        raise UserError(f"{source} is empty")
    if (kind == ".json" and head.lstrip().startswith(b"[")) or (kind == ".parquet" and is_compressed(file)):
        return of_table(read_file(str(path), flag), column_name)  # in memory, or memory-mapped
    if kind == ".parquet":
        check_parquet(file, source, column_name)
    separator = separator_of(kind, csv_delimiter)

    def batches(within: range | None = None, at_once: int = BATCH_DOCUMENTS) -> Batches:
        """All texts, or those of the lines that begin at the bytes `within`, or those of the row groups `within`."""
        try:
            if kind in TEXT_FILES:
                yield from _in_batches((text.rstrip("\r\n") for _, text in lines(file, source, within)), at_once)
            elif kind == ".parquet":
                yield from _parquet(file, column_name, within, at_once)
            elif kind in (".csv", ".tsv"):
                yield from _csv(file, source, column_name, separator)
            else:
                yield from _in_batches(_json_lines(file, source, column_name, within), at_once)
        except pa.ArrowException as error:
            raise UserError(f"{source} is malformed: {first_line(error)}") from None

    def content() -> str:
        """A digest of the file. It is slow to compute, so it is cached by path, inode, size and times.

        st_ctime is included because rsync -t and cp -p can restore st_mtime with different content. The quotation
        marks of a CSV file are checked at the same time.
        """
        of_content = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        how = [csv_delimiter] if csv_delimiter and kind in (".csv", ".tsv") else []
        known_by = repr((str(file.resolve()), *of_content, *how)).encode()

        def build(folder: Path) -> None:
            if kind in (".csv", ".tsv"):
                with opened(file, source) as stream:
                    check_quotes(stream, separator, source)
            with file.open("rb") as stream:
                (folder / "digest").write_text(hashlib.file_digest(stream, "blake2b").hexdigest()[:32])

        folder = build_once(f"file-{hashlib.blake2b(known_by, digest_size=16).hexdigest()}", build)
        read_as = kind + (file.suffix.lower() if is_compressed(file) else "") + "".join(how)
        return f"{read_as} {column_name if kind not in TEXT_FILES else ''} {(folder / 'digest').read_text()}"

    @cache
    def parts() -> list[Part]:
        digest = content()
        ranges: list[tuple[range | None, int]] = [(None, status.st_size)]
        if kind == ".parquet":
            ranges = [*row_groups(file, PART_BYTES)]
        elif not is_compressed(file) and kind not in (".csv", ".tsv"):
            starts = range(0, status.st_size, PART_BYTES)
            ranges = [(range(start, min(start + PART_BYTES, status.st_size)), PART_BYTES) for start in starts]
        return [
            Part(f"{digest} {each}", partial(batches, each, PART_BATCH), is_compressed(file) or size > 2 * PART_BYTES)
            for each, size in ranges
        ]

    return Documents(source, batches, parts)


def digest_of(batches: Iterable[list[str | None]]) -> str:
    """A digest of all texts, independent of the batch boundaries."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for text in batch:
            encoded = (text or "").encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()


def digest_of_words(words: Iterable[str]) -> str:
    """A digest of words without line breaks."""
    return hashlib.blake2b("\n".join(words).encode(), digest_size=16).hexdigest()


def first_texts(documents: Documents, most_bytes: int) -> pa.Table:
    """The first texts, about `most_bytes` characters in total, in a column text: training data for a tokenizer.

    Raises:
        UserError: there is no text.
    """
    texts: list[str] = []
    size = 0
    for batch in documents.batches():
        found = [text for text in batch if text and not text.isspace()]
        texts += found
        size += sum(map(len, found))
        if size >= most_bytes:
            break
    if not texts:
        raise UserError(f"{documents.source} contains no text")
    return named(pa.table({"text": pa.array(texts, pa.large_string())}), documents.source)


def check_is_text(type_: Any, column_name: str, source: str) -> None:
    """Raise UserError if an Arrow type is not text."""
    if not is_text(type_):
        raise UserError(f"{FLAG} {column_name}: this column of {source} contains {type_}, not text")


def check_parquet(file: Path, source: str, column_name: str) -> None:
    """Raise UserError if a file is not Parquet or has no text column of this name."""
    try:
        schema = pyarrow.parquet.read_schema(file)
    except pa.ArrowException as error:
        raise UserError(f"{source} is malformed: {first_line(error)}") from None
    refuse_repeated(schema.names, source)
    _check_column(schema.names, column_name, source)
    type_ = schema.field(column_name).type
    check_is_text(type_.value_type if pa.types.is_dictionary(type_) else type_, column_name, source)


def _check_column(names: list[str], column_name: str, source: str) -> None:
    if column_name not in names:
        raise no_such_column(names, column_name, FLAG, source)


def _in_batches(texts: Iterable[str | None], at_once: int) -> Batches:
    batch: list[str | None] = []
    for text in texts:
        batch.append(text)
        if len(batch) == at_once:
            yield batch
            batch = []
    if batch:
        yield batch


def _json_lines(file: Path, source: str, column_name: str, within: range | None = None) -> Iterator[str | None]:
    for at, line in lines(file, source, within):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            with opened(file, source) as stream:
                whole = why_not_rows(stream.read(LARGEST_OBJECT)) if kind_of(file) == ".json" else None
            number = line_number(file, source, at)
            raise UserError(
                f"{source} {whole}" if whole else f"{source} is malformed in line {number:,}: {why_no_json(error)}"
            ) from None
        if not (isinstance(row, dict) and column_name in row and _is_text_or_null(row[column_name])):
            raise _no_text(row, line, line_number(file, source, at), source, column_name)
        yield row[column_name]


def _is_text_or_null(value: Any) -> bool:
    # `isascii` takes no time, and the search takes longer than decoding JSON.
    return value is None or (isinstance(value, str) and (value.isascii() or not LONE_SURROGATE.search(value)))


def _no_text(row: Any, line: str, number: int, source: str, column_name: str) -> UserError:
    """The error about a line of a JSON file that has no valid text."""
    if not isinstance(row, dict):
        return UserError(f"{source} is malformed in line {number:,}: not an object, {{column: value, …}}")
    if column_name not in row:
        if whole := why_not_rows(line.encode(errors="surrogatepass")):
            return UserError(f"{source} {whole}")
        return no_such_column(list(row), column_name, FLAG, f"line {number:,} of {source}")
    text = row[column_name]
    if isinstance(text, str):
        return UserError(f"{source} is malformed in line {number:,}: {why_no_row({column_name: text})}")
    return UserError(f"{FLAG} {column_name}: {source} contains {text!r:.50} in line {number:,}, not text")


def _parquet(file: Path, column_name: str, groups: range | None, at_once: int) -> Batches:
    with pyarrow.parquet.ParquetFile(file, memory_map=True) as parquet:
        for batch in parquet.iter_batches(at_once, row_groups=groups, columns=[column_name]):
            batch.validate(full=True)  # the Parquet reader does not check that text is UTF-8
            yield batch.column(0).to_pylist()


def _csv(file: Path, source: str, column_name: str, separator: str) -> Batches:
    with opened(file, source) as stream:
        head = stream.read(1 << 16)
    if b"\0" in head:
        raise UserError(f"{source} is not text: use a text file, or correct the file's extension")
    refuse_other_separator(head, separator, source)
    parse = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    blocks = pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)  # threads would read far ahead
    with opened(file, source) as stream, pyarrow.csv.open_csv(stream, blocks, parse) as reader:
        names = reader.schema.names
    refuse_repeated(names, source)
    _check_column(names, column_name, source)
    # Convert only this column: the first block determines the types of the others, and later blocks may not fit them.
    convert = pyarrow.csv.ConvertOptions(include_columns=[column_name], column_types={column_name: pa.large_string()})
    with opened(file, source) as stream, pyarrow.csv.open_csv(stream, blocks, parse, convert) as reader:
        for block in reader:
            texts = block.column(column_name)
            for start in range(0, len(texts), BATCH_DOCUMENTS):
                yield texts.slice(start, BATCH_DOCUMENTS).to_pylist()
