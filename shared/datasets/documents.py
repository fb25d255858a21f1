"""Documents for language modeling: a column of text, memory-mapped if it is large, so it may be larger than memory.

Files become Arrow files in the cache, once. Data sets of the Hub and of `save_to_disk` are Arrow files already. The
default is the embedded docstrings.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pyarrow as pa

from shared.cache.prepared import key_digest, place_to_begin
from shared.datasets import arrow_files
from shared.datasets.readers import blocks, blocks_of_lines, find_files, is_compressed, kind_of, lines_of, opened
from shared.datasets.rows import column_of, content_of, is_text, named, no_such_column, source_of
from shared.datasets.tables import read_dataset
from shared.errors import UserError
from shared.options.data_options import DataOptions

FLAG = "--text_column_name"
BATCH_DOCUMENTS = 100  # rows that are read at once
PART_BYTES = 1 << 25  # of a part of a corpus; changing it prepares all data again
COMPRESSION = 4  # assumed size of the content of a compressed file, relative to the file
TEXT_FILES = (".txt", ".text", ".md")
KINDS = (*TEXT_FILES, ".csv", ".tsv", ".jsonl", ".json", ".parquet")

Batches = Iterator[list[str | None]]


@dataclass(frozen=True)
class Part:
    """Consecutive documents of a corpus."""

    content: str  # a digest of them
    texts: pa.ChunkedArray  # None and white space are not documents

    def batches(self) -> Batches:
        """Yield lists of texts."""
        for chunk in self.texts.chunks:
            for start in range(0, len(chunk), BATCH_DOCUMENTS):
                yield chunk.slice(start, BATCH_DOCUMENTS).to_pylist()


@dataclass(frozen=True)
class Documents:
    """Texts in parts of about PART_BYTES, or of one block of an Arrow file."""

    source: str  # their name in messages: "--train_file corpus.txt"
    parts: tuple[Part, ...]

    def batches(self) -> Batches:
        """Yield lists of texts; None and white space are not documents."""
        return chain.from_iterable(part.batches() for part in self.parts)

    def content(self) -> str:
        """A digest of all texts."""
        return key_digest([part.content for part in self.parts])


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
    texts = column_of(table, column_name, FLAG, as_text=True)
    if not is_text(texts.type):
        raise UserError(f"{FLAG} {column_name}: this column of {source_of(table)} contains {texts.type}, not text")
    parts: list[Part] = []
    first = 0
    for together in small_together([chunk.nbytes for chunk in texts.chunks]):
        part = pa.chunked_array(texts.chunks[together.start : together.stop], texts.type)
        content = content_of(table)
        digest = key_digest(content, column_name, first, len(part)) if content else digest_of(part)
        parts.append(Part(digest, part))
        first += len(part)
    return Documents(source_of(table), tuple(parts))


def of_files(given: Sequence[str], flag: str, column_name: str, csv_delimiter: str | None = None) -> Documents:
    """The texts of the files that `given` names (see `find_files`), in the order of the file names.

    A line of a text file is a document, or a row of another kind of file. Processes divide the files: each begins with
    another one, and finds those that others have read in the cache.

    Raises:
        UserError: one of them cannot be read, or lacks the column; names `flag`.
    """
    files = find_files(given, flag, KINDS, csv_delimiter)
    sizes = []
    for file in files:
        with opened(file, f"{flag} {file}"):
            sizes.append(file.stat().st_size * (COMPRESSION if is_compressed(file) else 1))
        if kind_of(file) in TEXT_FILES and column_name != "text":
            raise UserError(f"{FLAG} {column_name}: {flag} {file} has lines and no columns: remove the flag")

    def read(file: Path, source: str) -> Iterator[pa.Table]:
        if kind_of(file) in TEXT_FILES:
            empty = True
            for _, block in blocks_of_lines(file, source):
                yield pa.table({"text": lines_of(block)})
                empty = False
            if empty:
                raise UserError(f"{source} is empty")
            return
        for table in blocks(file, source, csv_delimiter, column_name):
            if column_name not in table.column_names:
                raise no_such_column(table.column_names, column_name, FLAG, source)
            yield table.select([column_name])

    source, how = f"{flag} {' '.join(given)}", f"documents {column_name} {csv_delimiter}"
    groups = small_together(sizes)
    begin = place_to_begin(len(groups))
    found: dict[range, Documents] = {}
    for group in groups[begin:] + groups[:begin]:
        table = arrow_files.load(files[group.start : group.stop], flag, source, read, how)
        found[group] = of_table(table, column_name)
    return Documents(source, tuple(part for group in groups for part in found[group].parts))


def small_together(sizes: Sequence[int]) -> list[range]:
    """Cut a list into ranges of consecutive items with at most PART_BYTES, or of one; `sizes` are in bytes."""
    ranges: list[range] = []
    room = -1
    for place, size in enumerate(sizes):
        if size > room:
            ranges.append(range(place, place))
            room = PART_BYTES
        ranges[-1] = range(ranges[-1].start, place + 1)
        room -= size
    return ranges


def digest_of(texts: pa.ChunkedArray) -> str:
    """A digest of texts in memory, independent of Arrow's chunk boundaries."""
    digest = hashlib.blake2b(digest_size=16)
    for text in texts.to_pylist():
        encoded = (text or "").encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()


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
