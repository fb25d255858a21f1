"""The text columns of a table in batches, and the tokens of a batch as flat arrays."""

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tokenizers
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.cache.division import cores_of_process, parts_by_size
from shared.cache.prepared import key_digest
from shared.datasets.rows import blocks_of, column_of, content_of, is_text, missing, refuse_missing, source_of
from shared.errors import UserError
from shared.pretrained.tokenizers import unknown_token
from shared.processes.ending import local_processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FLAG = "--text_column_names"
FORMAT = 5  # part of the names of tokens in the cache: increase it when the files for the same texts change
BATCH_ROWS = 1000  # enough for all threads of the tokenizer, few enough for frequent updates of the progress bar
BATCH_BYTES = 1 << 20  # of text in a batch, or one row: the tokenizer needs about 30 bytes of memory for each


def texts_of(table: pa.Table, text_columns: Sequence[str], flag: str = FLAG) -> pa.Table:
    """The text columns of a table, with its metadata; UserError, which names `flag`, for a type that is not text."""
    if not 1 <= len(text_columns) <= 2:
        raise UserError(f"{flag} {' '.join(text_columns)}: use one column, or two columns for text pairs")
    found = pa.table([text_column(table, name, flag) for name in text_columns], list(text_columns))
    return found.replace_schema_metadata(table.schema.metadata)


def text_column(table: pa.Table, name: str, flag: str) -> pa.ChunkedArray:
    """A column of text, or of nulls; UserError, which names `flag`, if it does not exist or has another type."""
    column = column_of(table, name, flag)
    if not (is_text(column.type) or pa.types.is_null(column.type)):
        raise UserError(f"{flag} {name}: this column of {source_of(table)} contains {column.type}, not text")
    return column


def refuse_empty(table: pa.Table, text_columns: Sequence[str]) -> None:
    """Raise UserError if a row has no text in a column: the rows that --skip_incomplete_rows skips."""
    for name in text_columns:
        for block in blocks_of(table):
            refuse_missing(block, name, missing(block, name), what="text")


def batches_of_texts(columns: pa.Table) -> Iterator[list[Any]]:
    """Yield lists of at most BATCH_ROWS texts or text pairs, with about BATCH_BYTES; "" for null and white space."""
    nothing = pa.scalar("", pa.large_string())
    for batch in filter(len, columns.to_reader(max_chunksize=BATCH_ROWS)):  # a list of all batches may be long
        filled = (pc.fill_null(column.cast(nothing.type), nothing) for column in batch.columns)
        texts = [pc.if_else(pc.utf8_is_space(column), nothing, column) for column in filled]
        sizes = sum(pc.binary_length(column).to_numpy() for column in texts)
        for part in parts_by_size(sizes, BATCH_BYTES):
            rows = [column.slice(part.start, len(part)).to_pylist() for column in texts]
            yield rows[0] if len(rows) == 1 else list(zip(*rows, strict=True))


def columns_in_batches(columns: pa.Table) -> Iterator[list[str]]:
    """Yield the texts of one column after the other."""
    return chain.from_iterable(batches_of_texts(columns.select([place])) for place in range(columns.num_columns))


def digest_of_texts(table: pa.Table, columns: pa.Table) -> str:
    """A digest of the texts in `columns` of a table, independent of Arrow's chunk boundaries.

    The texts of a memory-mapped table are not read: it has a digest of all its rows.
    """
    if content := content_of(table):
        return key_digest(content, columns.column_names)
    digest = hashlib.blake2b(digest_size=16)
    for batch in columns.combine_chunks().to_batches(BATCH_ROWS):
        digest.update(repr([column.to_pylist() for column in batch.columns]).encode())
    return digest.hexdigest()


class Encoder:
    """Converts texts to token ids, without transformers' wrapper where possible, because that doubles the time.

    Args:
        tokenizer: its settings do not change.
        max_length: tokens of a row, with special tokens. None: whole texts without special tokens, in which "[MASK]" is
            text; the tokenizer must be a fast one.
        prompt: put before each text.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_length: int | None, prompt: str = "") -> None:
        self.tokenizer, self.max_length, self.prompt = tokenizer, max_length, prompt
        self.id_type = np.uint16 if max(tokenizer.get_vocab().values()) <= np.iinfo(np.uint16).max else np.int32
        self.with_types = max_length is not None and "token_type_ids" in tokenizer.model_input_names
        self.unknown = -1 if (found := unknown_token(tokenizer)) is None else found
        self.fast: Tokenizer | None = None
        as_text = max_length is None or tokenizer.split_special_tokens
        if tokenizer.is_fast:
            self.fast = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, whose settings may change
            self.fast.no_padding()
            self.fast.no_truncation()
            if max_length is not None:
                self.fast.enable_truncation(max_length, direction=tokenizer.truncation_side)
            self.fast.encode_special_tokens = as_text
            content = self.fast.to_str().encode()
        else:
            with tempfile.TemporaryDirectory() as folder:
                tokenizer.save_pretrained(folder)
                content = b"".join(path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file())
        settings = FORMAT, tokenizers.__version__, max_length, as_text, self.with_types, self.unknown
        self.identity = repr((*settings, type(tokenizer).__name__)).encode() + content + prompt.encode()
        self.threads = min(2, cores_of_process()) if self.fast else 1  # one of them converts
        if local_processes() > 1:  # the threads of tokenizers; it keeps their number if it has already started them
            os.environ.setdefault("RAYON_NUM_THREADS", str(cores_of_process()))

    def encode(self, batch: list[Any]) -> tuple[NDArray[Any], NDArray[np.int64], NDArray[np.uint8]]:
        """The concatenated token ids, the number of tokens in each row (int64), and the token types (uint8)."""
        if self.prompt:
            batch = [self.prompt + text for text in batch]
        if self.fast:
            encodings = self.fast.encode_batch_fast(batch, add_special_tokens=self.max_length is not None)
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
