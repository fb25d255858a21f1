"""Documents for language modeling, read a few at a time: a corpus need not fit into memory.

Text files (a document per line), CSV, JSON lines and Parquet are streamed; data sets of the Hub and of `save_to_disk`
are memory-mapped Arrow tables; without any of these, the embedded docstrings.
"""

import codecs
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from shared.datasets.cache import build_once
from shared.datasets.readers import refuse_repeated, why_no_json
from shared.datasets.rows import column_of, named, source_of
from shared.datasets.tables import read_dataset, read_file
from shared.errors import UserError
from shared.options import Options

FLAG = "--text_column_name"
BATCH_DOCUMENTS = 1000
BLOCK_BYTES = 1 << 22  # of a file read at once; no row may be longer
TEXT_FILES = (".txt", ".text", ".md")
STREAMED = (*TEXT_FILES, ".csv", ".tsv", ".jsonl", ".json", ".parquet")

Batches = Iterator[list[str | None]]


@dataclass(frozen=True)
class Documents:
    """Texts that can be read from the start as often as needed."""

    source: str  # how to speak of them to the user: "--train_file corpus.txt"
    content: Callable[[], str]  # a digest of what `batches` gives; may take as long as reading it once
    batches: Callable[[], Batches]  # lists of texts; None or only space: no document


def load_documents(config: Options, text_column_name: str) -> tuple[Documents, Documents | None]:
    """Training documents and, where the source has some, validation documents: by the flags that every recipe has.

    Raises:
        UserError: data that is not there or cannot be read, or a flag without effect on it.
    """
    if config.train_file:
        train = of_file(config.train_file, "--train_file", text_column_name)
        if config.validation_file is None:
            return train, None
        return train, of_file(config.validation_file, "--validation_file", text_column_name)
    if name := config.dataset_name:
        table, held_out = read_dataset(name, config.dataset_config_name)
        return of_table(table, text_column_name), held_out and of_table(held_out, text_column_name)
    from shared.datasets import docstrings

    if text_column_name != "text":
        raise UserError(f"{FLAG} {text_column_name}: the embedded docstrings are in the column text: leave it out")
    everything = docstrings.documents()
    splits = everything["split"].to_pylist()
    both = [
        named(everything.filter(pa.array([split == part for split in splits])), f"the embedded docstrings ({part})")
        for part in ("train", "validation")
    ]
    return of_table(both[0], "text"), of_table(both[1], "text")


def of_table(table: pa.Table, column_name: str) -> Documents:
    """The texts of a column of an Arrow table.

    Raises:
        UserError: there is no such column, or it holds no text.
    """
    column = column_of(table, column_name, FLAG, as_text=True)
    check_is_text(column.type, column_name, source_of(table))

    def batches() -> Batches:
        for start in range(0, len(column), BATCH_DOCUMENTS):
            yield column.slice(start, BATCH_DOCUMENTS).to_pylist()

    return Documents(source_of(table), lambda: digest_of(batches()), batches)


def of_file(path: str, flag: str, column_name: str) -> Documents:
    """The texts of a file: a document per line of a text file, per row of the others.

    Raises:
        UserError: there is no such file, it is of an unknown kind, empty, or lacks the column; names `flag`.
    """
    source, file = f"{flag} {path}", Path(path)
    kind = file.suffix.lower()
    try:
        with file.open("rb") as stream:
            head = stream.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()
        status = file.stat()
    except FileNotFoundError:
        raise UserError(f"{source}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{source} is a folder: give a file ({', '.join(STREAMED)})") from None
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from None
    if kind not in STREAMED:
        raise UserError(f"{source}: unknown kind of file, known are {', '.join(STREAMED)}")
    if kind in TEXT_FILES and column_name != "text":
        raise UserError(f"{FLAG} {column_name}: {source} has lines and no columns: leave the flag out")
    if not status.st_size:
        raise UserError(f"{source} is empty")
    if kind == ".json" and head.startswith(b"["):  # an array has to be read whole
        return of_table(read_file(path, flag), column_name)
    if kind == ".parquet":
        check_parquet(file, source, column_name)

    def batches() -> Batches:
        try:
            if kind in TEXT_FILES:
                yield from _grouped(text.rstrip("\r\n") for _, text in _lines(file, source))
            elif kind == ".parquet":
                yield from _parquet(file, column_name)
            elif kind in (".csv", ".tsv"):
                yield from _separated(file, source, column_name, "," if kind == ".csv" else "\t")
            else:
                yield from _grouped(_json_lines(file, source, column_name))
        except pa.ArrowException as error:
            raise UserError(f"{source} is malformed: {str(error).strip().splitlines()[0][:200]}") from None

    def content() -> str:
        """The digest of the file; found once for a path, inode, size and times, because it takes a while.

        st_ctime is the kernel's: rsync -t and cp -p bring back st_mtime with other content.
        """
        of_content = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        known_by = repr((str(file.resolve()), *of_content)).encode()

        def build(folder: Path) -> None:
            with file.open("rb") as stream:
                (folder / "digest").write_text(hashlib.file_digest(stream, "blake2b").hexdigest()[:32])

        folder = build_once(f"file-{hashlib.blake2b(known_by, digest_size=16).hexdigest()}", build)
        return f"{kind} {column_name if kind not in TEXT_FILES else ''} {(folder / 'digest').read_text()}"

    return Documents(source, content, batches)


def digest_of(batches: Iterable[list[str | None]]) -> str:
    """A digest of texts, the same however they are cut into batches."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        for text in batch:
            encoded = (text or "").encode()
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()


def first_texts(documents: Documents, most_bytes: int) -> pa.Table:
    """The first texts, some `most_bytes` of them at most, as a table with the column text: to train a tokenizer on."""
    texts: list[str] = []
    size = 0
    for batch in documents.batches():
        found = [text for text in batch if text and not text.isspace()]
        texts += found
        size += sum(map(len, found))
        if size >= most_bytes:
            break
    if not texts:
        raise UserError(f"{documents.source} holds no text")
    return named(pa.table({"text": pa.array(texts, pa.large_string())}), documents.source)


def check_is_text(type_: Any, column_name: str, source: str) -> None:
    """UserError unless an Arrow type is one of text."""
    if not (pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_)):
        raise UserError(f"{FLAG} {column_name}: {source} holds {type_} there, not text")


def check_parquet(file: Path, source: str, column_name: str) -> None:
    """UserError unless a file is Parquet and has a column of text by that name."""
    try:
        schema = pyarrow.parquet.read_schema(file)
    except pa.ArrowException as error:
        raise UserError(f"{source} is malformed: {str(error).strip().splitlines()[0][:200]}") from None
    refuse_repeated(schema.names, source)
    _check_column(schema.names, column_name, source)
    type_ = schema.field(column_name).type
    check_is_text(type_.value_type if pa.types.is_dictionary(type_) else type_, column_name, source)


def _check_column(names: list[str], column_name: str, source: str) -> None:
    if column_name not in names:
        raise UserError(f"{FLAG} {column_name}: {source} has no such column (columns: {', '.join(names)})")


def _grouped(texts: Iterable[str | None]) -> Batches:
    batch: list[str | None] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH_DOCUMENTS:
            yield batch
            batch = []
    if batch:
        yield batch


def _lines(file: Path, source: str) -> Iterator[tuple[int, str]]:
    """The lines of a file and their numbers, from 1."""
    with file.open("rb") as stream:
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
            raise UserError(f"{source} is malformed in line {number:,}: {why_no_json(error)}") from None
        if not isinstance(row, dict):
            raise UserError(f"{source} is malformed in line {number:,}: not an object, {{column: value, …}}")
        _check_column(list(row), column_name, source)
        text = row[column_name]
        if not isinstance(text, str | None):
            raise UserError(f"{FLAG} {column_name}: {source} holds {text!r:.50} in line {number:,}, not text")
        yield text


def _parquet(file: Path, column_name: str) -> Batches:
    with pyarrow.parquet.ParquetFile(file, memory_map=True) as parquet:
        for batch in parquet.iter_batches(BATCH_DOCUMENTS, columns=[column_name]):
            yield batch.column(0).to_pylist()


def _separated(file: Path, source: str, column_name: str, separator: str) -> Batches:
    with file.open("rb") as stream:
        if b"\0" in stream.read(4096):
            raise UserError(f"{source} is not text: give a text file or one of another extension")
    parse = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    blocks = pyarrow.csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False)  # with threads it reads far ahead
    with pyarrow.csv.open_csv(file, read_options=blocks, parse_options=parse) as reader:
        names = reader.schema.names
    refuse_repeated(names, source)
    _check_column(names, column_name, source)
    # Only this column is converted: the first block decides the types of others, and later ones may not fit.
    convert = pyarrow.csv.ConvertOptions(include_columns=[column_name], column_types={column_name: pa.large_string()})
    with pyarrow.csv.open_csv(file, read_options=blocks, parse_options=parse, convert_options=convert) as reader:
        for block in reader:
            texts = block.column(column_name)
            for start in range(0, len(texts), BATCH_DOCUMENTS):
                yield texts.slice(start, BATCH_DOCUMENTS).to_pylist()
