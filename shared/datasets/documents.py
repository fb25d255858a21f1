"""Documents for language modeling, read a few at a time, so that a corpus may be larger than memory.

Files are streamed; only a JSON array is in memory as a whole. Data sets of the Hub and of `save_to_disk` are
memory-mapped Arrow tables. The default is the embedded docstrings.
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

import pyarrow as pa
import pyarrow.parquet

from shared.cache.prepared import key_digest, text_once
from shared.datasets.arrow_files import state_of
from shared.datasets.readers import (
    blocks,
    blocks_of_lines,
    find_files,
    is_compressed,
    kind_of,
    line_number,
    opened,
    refuse_repeated,
    row_groups,
    why_no_object,
    without_dictionaries,
)
from shared.datasets.rows import column_of, is_text, named, no_such_column, source_of
from shared.datasets.tables import read_dataset
from shared.errors import UserError, about
from shared.options.data_options import DataOptions

FLAG = "--text_column_name"
BATCH_DOCUMENTS = 100  # rows that are read at once
PART_BYTES = 1 << 25  # of a part of a file; changing it prepares all data again
PART_ROWS = 1 << 15  # of a part of a table
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
    from shared.demo_data import texts

    if text_column_name != "text":
        raise UserError(f"{FLAG} {text_column_name}: the embedded docstrings are in the column text: remove the flag")
    everything = texts.documents()
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
    _check_column(table.schema, column_name, source_of(table))
    column = column_of(table, column_name, FLAG, as_text=True)

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
    files = find_files(given, flag, STREAMED, csv_delimiter)
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
    files and compressed ones have one part, because they can only be read from their start.

    Raises:
        UserError: the file does not exist, has an unknown kind, is empty, or lacks the column; names `flag`.
    """
    (file,) = find_files([str(path)], flag, STREAMED)
    source, kind = f"{flag} {path}", kind_of(file)
    if kind in TEXT_FILES and column_name != "text":
        raise UserError(f"{FLAG} {column_name}: {source} has lines and no columns: remove the flag")
    with opened(file, source) as stream:
        head = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
    if not head:
        raise UserError(f"{source} is empty")
    read: Callable[..., Batches] = partial(_rows, file, source, column_name, csv_delimiter)
    in_ranges = not is_compressed(file)
    if kind in TEXT_FILES:
        read = partial(_lines, file, source)
    elif kind == ".parquet" and in_ranges:
        with about(source):
            schema = pyarrow.parquet.read_schema(file)
        _check_column(schema, column_name, source)
        read = partial(_parquet, file, source, column_name)
    elif kind in (".json", ".jsonl") and not head.startswith(b"["):
        read = partial(_json_lines, file, source, column_name)
    else:
        in_ranges = False

    @cache
    def parts() -> list[Part]:
        content = f"{kind} {is_compressed(file)} {column_name} {csv_delimiter} {_digest_of_file(file)}"
        size = file.stat().st_size
        ranges: list[tuple[range | None, int]] = [(None, size)]
        if in_ranges and kind == ".parquet":
            ranges = [*row_groups(file, PART_BYTES)]
        elif in_ranges:
            starts = range(0, size, PART_BYTES)
            ranges = [(range(start, min(start + PART_BYTES, size)), PART_BYTES) for start in starts]
        return [
            Part(f"{content} {each}", partial(read, each), is_compressed(file) or size > 2 * PART_BYTES)
            for each, size in ranges
        ]

    return Documents(source, read, parts)


def _digest_of_file(file: Path) -> str:
    """A digest of a file. It is slow to compute, so it is cached by the state of the file."""
    name = f"file-{key_digest(state_of(file))}"

    def compute() -> str:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "blake2b").hexdigest()[:32]

    return text_once(name, "digest", compute)


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
    """The first texts with `most_bytes` characters in total, in a column text: training data for a tokenizer.

    Raises:
        UserError: there is no text.
    """
    texts: list[str] = []
    size = 0
    for text in chain.from_iterable(documents.batches()):
        if text and not text.isspace():
            texts.append(text)
            size += len(text)
        if size >= most_bytes:
            break
    if not texts:
        raise UserError(f"{documents.source} contains no text")
    return named(pa.table({"text": pa.array(texts, pa.large_string())}), documents.source)


def _check_column(schema: pa.Schema, name: str, source: str) -> None:
    """Raise UserError if a table with this schema has no text column of this name."""
    refuse_repeated(schema.names, source)
    type_ = column_of(named(without_dictionaries(schema).empty_table(), source), name, FLAG, as_text=True).type
    if not is_text(type_):
        raise UserError(f"{FLAG} {name}: this column of {source} contains {type_}, not text")


def _lines(file: Path, source: str, within: range | None = None) -> Batches:
    """The lines of a text file that begin at the bytes `within`."""
    for _, block in blocks_of_lines(file, source, within):
        yield [line.rstrip("\r") for line in block.decode().removesuffix("\n").split("\n")]


def _json_lines(file: Path, source: str, column_name: str, within: range | None = None) -> Batches:
    """The texts of a JSON lines file, in the lines that begin at the bytes `within`."""
    for at, block in blocks_of_lines(file, source, within):
        texts: list[str | None] = []
        for number, line in enumerate(block.split(b"\n")):
            if not line or line.isspace():
                continue
            try:
                text = json.loads(line)[column_name]
                if text is not None:
                    text.encode()  # refuses half of a character, which JSON can hold and UTF-8 cannot
                texts.append(text)
            except (ValueError, TypeError, KeyError, AttributeError):
                place = f"line {line_number(file, source, at) + number:,}"
                if problem := why_no_object(line):
                    raise UserError(f"{source} is malformed in {place}: {problem}") from None
                row = json.loads(line)
                if column_name not in row:
                    raise no_such_column([*row], column_name, FLAG, f"{place} of {source}") from None
                found = f"{row[column_name]!a:.50}"
                raise UserError(f"{FLAG} {column_name}: {source} contains {found} in {place}, not text") from None
        yield texts


def _rows(file: Path, source: str, column_name: str, csv_delimiter: str | None, _: None = None) -> Batches:
    """The texts of any file of rows, from its start."""
    for table in blocks(file, source, csv_delimiter):
        _check_column(table.schema, column_name, source)
        for batch in table.select([column_name]).to_batches(BATCH_DOCUMENTS):
            yield batch.column(0).to_pylist()


def _parquet(file: Path, source: str, column_name: str, groups: range | None = None) -> Batches:
    with about(source), pyarrow.parquet.ParquetFile(file, memory_map=True) as parquet:
        for batch in parquet.iter_batches(BATCH_DOCUMENTS, row_groups=groups, columns=[column_name]):
            batch.validate(full=True)  # the Parquet reader does not check that text is UTF-8
            yield batch.column(0).to_pylist()
