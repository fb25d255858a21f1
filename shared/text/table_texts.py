"""The text columns of a table, read in batches."""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.cache.prepared import key_digest
from shared.datasets.rows import FILL_IN, blocks_of, column_of, content_of, is_text, missing, source_of, where
from shared.errors import UserError

FLAG = "--text_column_names"
BATCH_ROWS = 1000  # enough for all threads of the tokenizer, few enough for frequent updates of the progress bar
BATCH_BYTES = 1 << 20  # of text in a batch, or one row: the tokenizer needs about 30 bytes of memory for each


def texts_of(table: pa.Table, text_columns: Sequence[str]) -> pa.Table:
    """The text columns of a table; UserError for a type that is not text."""
    if not 1 <= len(text_columns) <= 2:
        raise UserError(f"{FLAG} {' '.join(text_columns)}: use one column, or two columns for text pairs")
    return pa.table([text_column(table, name, FLAG) for name in text_columns], list(text_columns))


def text_column(table: pa.Table, name: str, flag: str) -> pa.ChunkedArray:
    """A column of text, or of nulls; UserError, which names `flag`, if it does not exist or has another type."""
    column = column_of(table, name, flag)
    if not (is_text(column.type) or pa.types.is_null(column.type)):
        raise UserError(f"{flag} {name}: this column of {source_of(table)} contains {column.type}, not text")
    return column


def refuse_empty(table: pa.Table, text_columns: Sequence[str]) -> None:
    """Raise UserError if a row has no text in a column: the rows that --skip_incomplete_rows skips."""
    for name in text_columns:
        gaps = ((block, np.flatnonzero(missing(block, name))) for block in blocks_of(table))
        if found := [(block, rows) for block, rows in gaps if len(rows)]:
            (block, rows), count = found[0], sum(len(rows) for _, rows in found)
            such = f" ({count:,} such rows)" if count > 1 else ""
            raise UserError(f"{where(block, int(rows[0]))} has no text in {name}{such}: {FILL_IN}")


def batches_of(columns: pa.Table) -> Iterator[list[Any]]:
    """Yield lists of at most BATCH_ROWS texts or text pairs, with about BATCH_BYTES; "" for null and white space."""
    nothing = pa.scalar("", pa.large_string())
    for batch in filter(len, columns.to_reader(max_chunksize=BATCH_ROWS)):  # a list of all batches may be long
        filled = (pc.fill_null(column.cast(nothing.type), nothing) for column in batch.columns)
        texts = [pc.if_else(pc.utf8_is_space(column), nothing, column) for column in filled]
        ends = np.cumsum(sum(pc.binary_length(column).to_numpy() for column in texts))
        cuts = np.flatnonzero(np.diff(ends // BATCH_BYTES)) + 1
        for start, end in pairwise([0, *cuts.tolist(), len(ends)]):
            rows = [column.slice(start, end - start).to_pylist() for column in texts]
            yield rows[0] if len(rows) == 1 else list(zip(*rows, strict=True))


def columns_in_batches(columns: pa.Table) -> Iterator[list[str]]:
    """Yield the texts of one column after the other."""
    return chain.from_iterable(batches_of(columns.select([place])) for place in range(columns.num_columns))


def digest_of(table: pa.Table, columns: pa.Table) -> str:
    """A digest of the texts in `columns` of a table, independent of Arrow's chunk boundaries.

    The texts of a memory-mapped table are not read: it has a digest of all its rows.
    """
    if content := content_of(table):
        return key_digest(content, columns.column_names)
    digest = hashlib.blake2b(digest_size=16)
    for batch in columns.combine_chunks().to_batches(BATCH_ROWS):
        digest.update(repr([column.to_pylist() for column in batch.columns]).encode())
    return digest.hexdigest()
