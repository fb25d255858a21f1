"""Documents for language modeling, read a few at a time, so that a corpus may be larger than memory.

Text files (one document per line), CSV, JSON lines and Parquet are streamed. Data sets of the Hub and of `save_to_disk`
are memory-mapped Arrow tables. The default is the embedded docstrings.
"""

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from shared.config.options import Options
from shared.datasets.files import find_files, is_compressed, kind_of, opened, refuse_unknown
from shared.datasets.prepared import build_once
from shared.datasets.readers import (
    LONE_SURROGATE,
    check_quotes,
    first_line,
    refuse_other_separator,
    refuse_repeated,
    separator_of,
    why_no_json,
    why_no_row,
    why_not_rows,
)
from shared.datasets.rows import column_of, is_text, named, no_such_column, source_of
from shared.datasets.tables import read_dataset, read_file
from shared.errors import UserError

FLAG = "--text_column_name"
BATCH_DOCUMENTS = 1000
BLOCK_BYTES = 1 << 22  # size of the blocks in which a file is read, and the maximum length of a row
TEXT_FILES = (".txt", ".text", ".md")
STREAMED = (*TEXT_FILES, ".csv", ".tsv", ".jsonl", ".json", ".parquet")

Batches = Iterator[list[str | None]]


@dataclass(frozen=True)
class Documents:
    """Texts that can be read from the start as often as needed."""

    source: str  # their name in messages: "--train_file corpus.txt"
    content: Callable[[], str]  # returns a digest of all texts; may take as long as reading them once
    batches: Callable[[], Batches]  # yields lists of texts; None and white space are not documents


def load_documents(config: Options, text_column_name: str) -> tuple[Documents, Documents | None]:
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

    def batches() -> Batches:
        for start in range(0, len(column), BATCH_DOCUMENTS):
            yield column.slice(start, BATCH_DOCUMENTS).to_pylist()

    return Documents(source_of(table), lambda: digest_of(batches()), batches)


def of_files(given: Sequence[str], flag: str, column_name: str, csv_delimiter: str | None = None) -> Documents:
    """The texts of the files that `given` names (see `find_files`), in the order of the file names.

    Raises:
        UserError: one of them cannot be read; names `flag`.
    """
    files = find_files(given, flag, STREAMED)
    if csv_delimiter is not None and not any(kind_of(file) in (".csv", ".tsv") for file in files):
        raise UserError(f"--csv_delimiter {csv_delimiter} has no effect on {flag} {files[0]}: remove it")
    parts = [of_file(file, flag, column_name, csv_delimiter) for file in files]
    if len(parts) == 1:
        return parts[0]

    def content() -> str:
        return hashlib.blake2b("\n".join(part.content() for part in parts).encode(), digest_size=16).hexdigest()

    def batches() -> Batches:
        for part in parts:
            yield from part.batches()

    return Documents(f"{flag} {' '.join(given)}", content, batches)


def of_file(path: str | Path, flag: str, column_name: str, csv_delimiter: str | None = None) -> Documents:
    """The texts of a file: one document per line of a text file, or per row of another kind of file.

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
        return of_table(read_file(str(path), flag), column_name)  # neither can be streamed
    if kind == ".parquet":
        check_parquet(file, source, column_name)
    separator = separator_of(kind, csv_delimiter)

    def batches() -> Batches:
        try:
            if kind in TEXT_FILES:
                yield from _in_batches(text.rstrip("\r\n") for _, text in _lines(file, source))
            elif kind == ".parquet":
                yield from _parquet(file, column_name)
            elif kind in (".csv", ".tsv"):
                yield from _csv(file, source, column_name, separator)
            else:
                yield from _in_batches(_json_lines(file, source, column_name))
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

    return Documents(source, content, batches)


def digest_of(batches: Iterable[list[str | None]]) -> str:
    """A digest of all texts, independent of the batch boundaries."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for text in batch:
            encoded = (text or "").encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()


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


def _in_batches(texts: Iterable[str | None]) -> Batches:
    batch: list[str | None] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def _lines(file: Path, source: str) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers, from 1."""
    with opened(file, source) as stream:
        for number, line in enumerate(stream, 1):
            try:
                yield number, (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).decode()
            except UnicodeDecodeError:
                raise UserError(
                    f"{source} is not UTF-8 (line {number:,}): convert it, for instance with iconv -f LATIN1 -t UTF-8"
                ) from None


def _json_lines(file: Path, source: str, column_name: str) -> Iterator[str | None]:
    for number, line in _lines(file, source):
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            with opened(file, source) as stream:
                whole = why_not_rows(stream.read()) if kind_of(file) == ".json" else None
            raise UserError(
                f"{source} {whole}" if whole else f"{source} is malformed in line {number:,}: {why_no_json(error)}"
            ) from None
        if not isinstance(row, dict):
            raise UserError(f"{source} is malformed in line {number:,}: not an object, {{column: value, …}}")
        if column_name not in row and (whole := why_not_rows(line.encode(errors="surrogatepass"))):
            raise UserError(f"{source} {whole}")
        _check_column(list(row), column_name, f"line {number:,} of {source}")
        text = row[column_name]
        if not isinstance(text, str | None):
            raise UserError(f"{FLAG} {column_name}: {source} contains {text!r:.50} in line {number:,}, not text")
        if text and LONE_SURROGATE.search(text):
            raise UserError(f"{source} is malformed in line {number:,}: {why_no_row({column_name: text})}")
        yield text


def _parquet(file: Path, column_name: str) -> Batches:
    with pyarrow.parquet.ParquetFile(file, memory_map=True) as parquet:
        for batch in parquet.iter_batches(BATCH_DOCUMENTS, columns=[column_name]):
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
