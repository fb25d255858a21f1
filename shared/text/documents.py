"""Documents for language modeling: a column of text, memory-mapped if it is large, so it may be larger than memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from shared.cache.prepared import key_digest, place_to_begin
from shared.datasets import arrow_files
from shared.datasets.readers import blocks, blocks_of_lines, find_files, is_compressed, kind_of, lines_of, opened
from shared.datasets.rows import named, source_of
from shared.datasets.tables import read_dataset
from shared.errors import UserError
from shared.options.data_options import DataOptions
from shared.text.table_texts import batches_of, digest_of, text_column

FLAG = "--text_column_name"
BLOCK_ROWS = 1 << 10  # documents of a block; more if there are many
GROUP_BYTES = 1 << 25  # of small files that become one Arrow file
COMPRESSION = 4  # assumed size of the content of a compressed file, relative to the file
TEXT_FILES = (".txt", ".text", ".md")
KINDS = (*TEXT_FILES, ".csv", ".tsv", ".jsonl", ".json", ".parquet")


@dataclass(frozen=True)
class Documents:
    """The texts of a corpus."""

    source: str  # their name in messages: "--train_file corpus.txt"
    texts: pa.ChunkedArray  # null and white space are not documents
    content: str  # a digest of the texts

    def batches(self, rows: range) -> Iterator[list[str]]:
        """Yield the texts of some documents in lists (see `batches_of`); "" for null and white space."""
        texts = self.texts.slice(rows.start, len(rows)).cast(pa.large_string())
        nothing = pa.scalar("", texts.type)
        texts = pc.fill_null(texts, nothing)
        return batches_of(pa.table({"text": pc.if_else(pc.utf8_is_space(texts), nothing, texts)}))


def load_documents(config: DataOptions, text_column_name: str) -> list[Documents]:
    """The training documents and, if the source has some, the validation documents, from the data flags of a config.

    Raises:
        UserError: the data does not exist or cannot be read, or a flag has no effect on it.
    """
    if config.train_file:
        given = {"--train_file": config.train_file, "--validation_file": config.validation_file}
        columns = text_column_name, config.csv_delimiter
        return [of_files(names, flag, *columns) for flag, names in given.items() if names]
    if config.dataset_name:
        tables = [table for table in read_dataset(config) if table is not None]
    else:
        from shared.demo_data import texts
        from shared.demo_data.embedded import in_splits

        parts = zip(("train", "validation"), in_splits(texts.documents()), strict=True)
        tables = [named(table, f"the embedded docstrings ({part})") for part, table in parts]
    return [of_table(table, text_column_name) for table in tables]


def of_table(table: pa.Table, column_name: str) -> Documents:
    """The texts in a column of an Arrow table.

    Raises:
        UserError: the column does not exist, or its type is not text.
    """
    texts = text_column(table, column_name, FLAG)
    return Documents(source_of(table), texts, digest_of(table, pa.table({column_name: texts})))


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

    def read(file: Path, source: str) -> Iterator[pa.Table]:
        tables: Iterator[pa.Table]
        if kind_of(file) in TEXT_FILES:
            tables = (pa.table({"text": lines_of(block)}) for _, block in blocks_of_lines(file, source))
        else:
            tables = blocks(file, source, csv_delimiter, column_name)
        found: pa.Table | None = None
        for found in tables:
            texts = text_column(named(found, source), column_name, FLAG)
            yield pa.table({"text": texts.cast(pa.large_string())})
        if found is None:
            raise UserError(f"{source} is empty")

    source, how = f"{flag} {' '.join(given)}", f"documents {column_name} {csv_delimiter}"
    groups = small_together(sizes)
    begin = place_to_begin(len(groups))
    found: dict[range, Documents] = {}
    for group in groups[begin:] + groups[:begin]:
        found[group] = of_table(arrow_files.load(files[group.start : group.stop], flag, source, read, how), "text")
    texts = [chunk for group in groups for chunk in found[group].texts.chunks]
    return Documents(
        source, pa.chunked_array(texts, pa.large_string()), key_digest([found[group].content for group in groups])
    )


def small_together(sizes: Sequence[int]) -> list[range]:
    """Cut a list into ranges of consecutive items with at most GROUP_BYTES, or of one; `sizes` are in bytes."""
    ranges: list[range] = []
    room = -1
    for place, size in enumerate(sizes):
        if size > room:
            ranges.append(range(place, place))
            room = GROUP_BYTES
        ranges[-1] = range(ranges[-1].start, place + 1)
        room -= size
    return ranges


def first_texts(documents: Documents, most_bytes: int) -> pa.Table:
    """The first texts with `most_bytes` characters in total, in a column text: training data for a tokenizer.

    Raises:
        UserError: there is no text.
    """
    count, texts, size = len(documents.texts), [], 0
    blocks = (range(start, min(start + BLOCK_ROWS, count)) for start in range(0, count, BLOCK_ROWS))
    batches = chain.from_iterable(documents.batches(rows) for rows in blocks)
    for text in filter(None, chain.from_iterable(batches)):
        texts.append(text)
        size += len(text)
        if size >= most_bytes:
            break
    if not texts:
        raise UserError(f"{documents.source} contains no text")
    return named(pa.table({"text": pa.array(texts, pa.large_string())}), documents.source)
