"""Documents for language modeling: a column of text, memory-mapped if it is large, so it may be larger than memory."""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa

from shared.cache.prepared import key_digest, place_to_begin
from shared.datasets import arrow_files
from shared.datasets.readers import blocks, blocks_of_lines, find_files, is_compressed, kind_of, lines_of, opened
from shared.datasets.rows import named, source_of, with_content
from shared.datasets.tables import read_dataset
from shared.errors import UserError
from shared.options.data_options import DataOptions
from shared.text.table_texts import batches_of, digest_of, text_column

FLAG = "--text_column_name"
GROUP_BYTES = 1 << 25  # of small files that become one Arrow file
COMPRESSION = 4  # assumed size of the content of a compressed file, relative to the file
TEXT_FILES = (".txt", ".text", ".md")
KINDS = (*TEXT_FILES, ".csv", ".tsv", ".jsonl", ".json", ".parquet")


def load_documents(config: DataOptions, text_column_name: str) -> list[pa.Table]:
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


def of_table(table: pa.Table, column_name: str) -> pa.Table:
    """The column of documents of an Arrow table.

    Raises:
        UserError: the column does not exist, or its type is not text.
    """
    texts = text_column(table, column_name, FLAG)
    return pa.table({column_name: texts}).replace_schema_metadata(table.schema.metadata)


def of_files(given: Sequence[str], flag: str, column_name: str, csv_delimiter: str | None = None) -> pa.Table:
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
    found: dict[range, pa.Table] = {}
    for group in groups[begin:] + groups[:begin]:
        found[group] = arrow_files.load(files[group.start : group.stop], flag, source, read, how)
    content = key_digest([digest_of(found[group], found[group]) for group in groups])
    texts = pa.concat_tables(found[group] for group in groups).replace_schema_metadata()  # without the first group's
    return with_content(named(texts, source), content)


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


def first_texts(documents: pa.Table, most_bytes: int) -> pa.Table:
    """The first texts with `most_bytes` characters in total, in a column text: training data for a tokenizer.

    Raises:
        UserError: there is no text.
    """
    texts, size = [], 0
    for text in filter(None, chain.from_iterable(batches_of(documents))):
        texts.append(text)
        size += len(text)
        if size >= most_bytes:
            break
    if not texts:
        raise UserError(f"{source_of(documents)} contains no text")
    return named(pa.table({"text": pa.array(texts, pa.large_string())}), source_of(documents))
