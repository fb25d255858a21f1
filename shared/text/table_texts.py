"""The text columns of a table, read in batches, and the files of their tokens."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from tokenizers import Tokenizer
from tqdm import tqdm

from shared.cache.blocks import Blocks, cores_of_process
from shared.cache.prepared import arrays_writer, read_array
from shared.datasets.rows import FILL_IN, column_of, content_of, is_text, source_of, where
from shared.errors import UserError
from shared.pretrained.tokenizers import threads_off, unknown_token
from shared.processes.exit_reasons import local_processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 3  # part of the names of tokens in the cache: increase it when the files for the same texts change
FLAG = "--text_column_names"
BATCH_ROWS = 1000  # enough for all threads of the tokenizer, few enough for frequent updates of the progress bar
UNDIVIDED_ROWS = 1 << 14  # a table of at most so many rows is tokenized by one process of a machine
BLOCK_ROWS = 1 << 12  # of a larger table: 0.2 s of one core for texts of 150 characters
PLACES = {"offsets": "input_ids"}  # see `arrays_writer`
BATCH_BYTES = 1 << 20  # of text in a batch, or one row: the tokenizer needs about 30 bytes of memory for each


def texts_of(table: pa.Table, text_columns: Sequence[str]) -> pa.Table:
    """The text columns of a table; UserError for a type that is not text."""
    if not 1 <= len(text_columns) <= 2:
        raise UserError(f"{FLAG} {' '.join(text_columns)}: use one column, or two columns for text pairs")
    columns = []
    for name in text_columns:
        column = column_of(table, name, FLAG, as_text=True)
        if not (is_text(column.type) or pa.types.is_null(column.type)):
            raise UserError(f"{FLAG} {name}: this column of {source_of(table)} contains {column.type}, not text")
        columns.append(column)
    return pa.table(columns, list(text_columns))


def refuse_empty(table: pa.Table, columns: pa.Table) -> None:
    """Raise UserError for missing and empty texts; `columns` are the text columns of `table`."""
    for name, column in zip(columns.column_names, columns.columns, strict=True):
        first, count, row = None, 0, 0
        for chunk in column.chunks:
            texts = chunk.cast(pa.large_string())
            empty = pc.or_(pc.equal(pc.binary_length(texts), 0), pc.utf8_is_space(texts))
            found = np.flatnonzero(pc.fill_null(empty, True))
            if first is None and len(found):
                first = row + int(found[0])
            count, row = count + len(found), row + len(chunk)
        if first is not None:
            such = f" ({count:,} such rows)" if count > 1 else ""
            raise UserError(f"{where(table, first)} has no text in {name}{such}: {FILL_IN}")


def batches_of(columns: pa.Table) -> Iterator[list[Any]]:
    """Yield lists of at most BATCH_ROWS texts or text pairs, with about BATCH_BYTES."""
    for batch in columns.to_batches(max_chunksize=BATCH_ROWS):
        texts = [column.cast(pa.large_string()) for column in batch.columns]
        ends = np.cumsum(sum(pc.binary_length(column).to_numpy() for column in texts))
        cuts = np.flatnonzero(np.diff(ends // BATCH_BYTES)) + 1
        for start, end in pairwise([0, *cuts.tolist(), len(ends)]):
            rows = [column.slice(start, end - start).to_pylist() for column in texts]
            yield rows[0] if len(rows) == 1 else list(zip(*rows, strict=True))


def columns_in_batches(columns: pa.Table) -> Iterator[list[str]]:
    """Yield the texts of one column after the other."""
    return chain.from_iterable(batches_of(columns.select([place])) for place in range(columns.num_columns))


def with_progress(columns: pa.Table) -> Iterator[list[str]]:
    """Yield the texts of all columns in lists, with a tqdm progress bar instead of the trainer's own."""
    total = columns.num_rows * columns.num_columns
    with tqdm(total=total, desc="training the tokenizer", unit=" texts", mininterval=0.5) as bar:
        for batch in columns_in_batches(columns):
            yield batch
            bar.update(len(batch))


def digest_of(settings: bytes, table: pa.Table, columns: pa.Table) -> str:
    """A digest of settings and texts, independent of Arrow's chunk boundaries.

    The texts of a memory-mapped table are not read: it has a digest of all its rows.
    """
    digest = hashlib.blake2b(hashlib.blake2b(settings).digest(), digest_size=16)
    if content := content_of(table):
        digest.update(repr((content, columns.column_names)).encode())
        return digest.hexdigest()
    for column in columns.columns:
        lengths = hashlib.blake2b()
        for chunk in column.cast(pa.large_string()).chunks:
            _, offset_buffer, text_buffer = chunk.buffers()
            offsets = np.frombuffer(offset_buffer, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
            lengths.update(np.diff(offsets).tobytes())
            digest.update(memoryview(text_buffer)[offsets[0] : offsets[-1]])
        digest.update(lengths.digest())
    return digest.hexdigest()


class Encoder:
    """Converts texts to token ids, without transformers' wrapper where possible, because that doubles the time."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> None:
        self.tokenizer, self.max_length = tokenizer, max_length
        self.id_type = np.uint16 if max(tokenizer.get_vocab().values()) <= np.iinfo(np.uint16).max else np.int32
        self.with_types = "token_type_ids" in tokenizer.model_input_names
        self.unknown = -1 if (found := unknown_token(tokenizer)) is None else found
        self.fast: Tokenizer | None = None
        if tokenizer.is_fast:
            # A copy, because truncation is a setting of the tokenizer and the caller's must not change.
            self.fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self.fast.no_padding()
            self.fast.enable_truncation(max_length, direction=tokenizer.truncation_side)
            self.fast.encode_special_tokens = tokenizer.split_special_tokens
            content = self.fast.to_str().encode()
        else:
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                content = b"".join(path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file())
        settings = (
            FORMAT,
            tokenizers.__version__,
            max_length,
            tokenizer.split_special_tokens,
            self.with_types,
            self.unknown,
        )
        self.identity = repr((*settings, type(tokenizer).__name__)).encode() + content

    def encode(self, batch: list[Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The concatenated token ids, the number of tokens in each row (int64), and the token types (uint8)."""
        if self.fast:
            encodings = self.fast.encode_batch_fast(batch)
            ids = [encoding.ids for encoding in encodings]
            types = [encoding.type_ids for encoding in encodings] if self.with_types else []
        else:
            pairs = list(zip(*batch, strict=True)) if isinstance(batch[0], tuple) else [batch]
            encoded = self.tokenizer(*map(list, pairs), truncation=True, max_length=self.max_length)
            ids, types = encoded["input_ids"], encoded.get("token_type_ids", [])
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        total = lengths.sum()
        flat = np.fromiter(chain.from_iterable(ids), self.id_type, total)
        return flat, lengths, np.fromiter(chain.from_iterable(types), np.uint8, total if self.with_types else 0)


@dataclass(frozen=True)
class TableTokens:
    """Writes the tokens of the rows of a table as the files that `TokenizedText` reads."""

    table: pa.Table
    columns: pa.Table  # its text columns
    encoder: Encoder
    special: int  # special tokens in each row

    def write_all(self, folder: Path) -> None:
        """Write the files of all rows, with a progress bar."""
        refuse_empty(self.table, self.columns)
        source = source_of(self.table)
        with tqdm(total=self.table.num_rows, desc=f"tokenizing {source}", unit=" rows", mininterval=0.5) as bar:
            self.write(folder, range(self.table.num_rows), bar.update)

    def write_divided(self, name: str) -> Path:
        """Write the files of all rows into the folder `name` of the cache, together with other processes; return it."""
        if local_processes() > 1:  # the threads of tokenizers; it keeps their number if it has already started them
            os.environ.setdefault("RAYON_NUM_THREADS", str(cores_of_process()))
        return Blocks(
            name,
            self.table.num_rows,
            BLOCK_ROWS,
            lambda _, folder, rows: self.write(folder, rows),
            self.join,
            "tokenizing",
            "rows",
            source_of(self.table),
            begin=lambda _: refuse_empty(self.table, self.columns),
            most_threads=2 if self.encoder.fast and not threads_off() else 1,  # one tokenizes, one converts
        ).build()

    def encoded(self, rows: range) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield what `Encoder.encode` returns for batches of the given rows."""
        yield from map(self.encoder.encode, batches_of(self.columns.slice(rows.start, len(rows))))

    def write(self, folder: Path, rows: range, count: Callable[[int], object] = lambda _: None) -> None:
        """Write the files of the given rows; calls `count(n)` after each n of them."""
        unknown = tokens = 0
        with arrays_writer(folder, PLACES) as append:
            append(self._no_rows())
            for ids, lengths, types in self.encoded(rows):
                if not lengths.all():
                    raise self._without_tokens(rows.stop)
                arrays = {"input_ids": ids, "lengths": lengths, "offsets": np.cumsum(lengths)}
                append(arrays | ({"token_type_ids": types} if self.encoder.with_types else {}))
                unknown += int(np.count_nonzero(ids == self.encoder.unknown))
                tokens += len(ids)
                count(len(lengths))
        (folder / "unknown").write_text(f"{unknown} {tokens - self.special * len(rows)}")

    def join(self, _: Path, folder: Path, blocks: list[Path]) -> None:
        """Write the files of all rows from those of consecutive blocks."""
        unknown = np.zeros(2, np.int64)
        with arrays_writer(folder, PLACES) as append:
            append(self._no_rows())
            for block in blocks:
                arrays = {name: read_array(block / f"{name}.npy") for name in self._no_rows()}
                append(arrays | {"offsets": arrays["offsets"][1:]})
                unknown += np.array((block / "unknown").read_text().split(), np.int64)
        (folder / "unknown").write_text("{} {}".format(*unknown))

    def _no_rows(self) -> dict[str, np.ndarray]:
        """The arrays of a table without rows, with their types. The offsets end with the number of all tokens."""
        types = {"token_type_ids": np.empty(0, np.uint8)} if self.encoder.with_types else {}
        empty = {"input_ids": np.empty(0, self.encoder.id_type), "lengths": np.empty(0, np.int32), **types}
        return empty | {"offsets": np.zeros(1, np.int64)}

    def _without_tokens(self, end: int) -> UserError:
        """The error for the first row before `end` without tokens: the same one, whichever such row a process meets."""
        row = 0
        for _, lengths, _ in self.encoded(range(end)):
            if not lengths.all():
                row += int(lengths.argmin())
                break
            row += len(lengths)
        return UserError(f"{where(self.table, row)} has a text without tokens: remove the row")
