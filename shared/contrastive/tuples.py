"""Samples of two or three texts each: an anchor, its positive and, optionally, a hard negative."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from shared.cache.prepared import arrays_writer, build_once, each_share, read_array
from shared.datasets.rows import named
from shared.datasets.tables import limited, load_tables
from shared.demo_data import pairs
from shared.encoders.packed_texts import PackedTexts, pack_or_pad_texts
from shared.errors import UserError
from shared.options.data_options import DataOptions
from shared.plan.draws import hash64
from shared.text.tokenized import Item, Padding, Rows, TokenizedText, tokenize

FLAG = "--text_column_names"
FORMAT = 2  # part of the cache's names: increase it when the files for the same input change
ROWS_AT_ONCE = 10_000  # texts whose lengths are read, or digests computed, at once


def load_tuples(config: DataOptions, columns: Sequence[str]) -> tuple[pa.Table, pa.Table]:
    """The training and validation rows; by default, the docstrings and sources of functions of installed libraries.

    Raises:
        UserError: the data cannot be read, or `columns` are not two or three different ones.
    """
    given = f"{FLAG} {' '.join(columns)}"
    if len(columns) not in (2, 3) or len({*columns}) < len(columns):
        raise UserError(
            f"{given}: name two or three columns, each once: of the anchors, of the positives and, optionally, of the "
            "hard negatives"
        )

    def embedded() -> list[pa.Table]:
        return [named(table, "the embedded functions") for table in pairs.load()]

    return limited(load_tables(config, columns, (), embedded=embedded), config)


def tokenize_tuples(table: pa.Table, columns: Sequence[str], tokenizer: Any, max_length: int) -> "TextTuples":
    """The tokens of the texts in `columns`, each truncated to `max_length` by the tokenizer.

    Raises:
        UserError, Unfinished: see `tokenize`. A task of a job array writes its share of each column first.
    """
    return TextTuples(each_share(lambda column: tokenize(table, (column,), tokenizer, max_length), columns))


class TextTuples(Dataset):
    """The texts of several columns; sample i has text i of each column.

    Attributes:
        columns: the texts of each column.
        text_lengths: int32 [N, texts], the tokens of each text. A memory map, like the next two.
        lengths: int32 [N], the tokens of all texts of each sample together.
        longest: int32 [N], the tokens of the longest text of each sample.
    """

    draws_random = False

    def __init__(self, columns: Sequence[TokenizedText]) -> None:
        self.columns = tuple(columns)
        name = hashlib.blake2b(" ".join(texts.folder.name for texts in columns).encode(), digest_size=16).hexdigest()

        def build(folder: Path) -> None:
            with arrays_writer(folder, {}) as append:
                for start in range(0, len(self.columns[0]), ROWS_AT_ONCE):
                    rows = slice(start, start + ROWS_AT_ONCE)
                    each = np.stack([texts.lengths[rows] for texts in self.columns], axis=1).astype(np.int32)
                    append({"each": each.ravel(), "lengths": each.sum(1, dtype=np.int32), "longest": each.max(1)})

        folder = build_once(f"tuples-{FORMAT}-{name}", build)
        each, self.lengths, self.longest = (read_array(folder / f"{n}.npy") for n in ("each", "lengths", "longest"))
        self.text_lengths = each.reshape(-1, len(self.columns))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> tuple[Item, ...]:
        return tuple(texts[row] for texts in self.columns)

    def read_micro_batch(self, samples: NDArray[np.int64], epochs: NDArray[np.int64]) -> Rows:
        """The texts of `samples` as one array of each kind: all anchors, then all positives, then all negatives."""
        lengths, tokens, types, _ = zip(*(c.read_micro_batch(samples, epochs) for c in self.columns), strict=True)
        return (
            np.concatenate(lengths),
            np.concatenate(tokens),
            None if types[0] is None else np.concatenate(types),
            None,
        )

    def digests_of(self, column: int) -> NDArray[np.int64]:
        """The digests of all texts of a column, int64 [N]; see `text_digests`."""
        texts, found = self.columns[column], []
        for start in range(0, len(self), ROWS_AT_ONCE):
            rows = np.arange(start, min(start + ROWS_AT_ONCE, len(self)))
            lengths, tokens, *_ = texts.read_micro_batch(rows, rows)
            found.append(text_digests(tokens, lengths))
        return np.concatenate(found)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), (self.columns,)

    def digest(self) -> str:
        """A digest of the tokens."""
        return hashlib.blake2b("".join(c.digest() for c in self.columns).encode(), digest_size=16).hexdigest()

    def summary(self) -> dict[str, int]:
        """The number of samples, and of tokens in all their texts."""
        return {"samples": len(self), "tokens": sum(int(texts.offsets[-1]) for texts in self.columns)}


@dataclass(frozen=True)
class TupleCollate:
    """Collates samples of `TextTuples`: packed into one row, or one text per row with padding.

    Attributes:
        of_texts: collates texts of a single column.
        texts: texts per sample.
    """

    of_texts: Padding | PackedTexts
    texts: int

    def __call__(self, rows: Rows) -> dict[str, Any]:
        """The batch of the model, and `digests`, int64 [texts, samples]."""
        lengths, tokens, *_ = rows
        return self.of_texts(rows) | {"digests": torch.from_numpy(text_digests(tokens, lengths)).view(self.texts, -1)}

    def sizes(self, data: TextTuples) -> dict[str, Any]:
        """The arguments of `Plan` for the cost of a sample: its tokens, or all its texts padded to the longest one."""
        if isinstance(self.of_texts, PackedTexts):
            return {"lengths": data.lengths, "packed": True}
        padding = self.of_texts
        return {"lengths": data.longest, "padded": lambda lengths: self.texts * padding.padded_lengths(lengths)}


def text_digests(tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """A 64-bit digest of the tokens of each text, int64 [texts]; `tokens` [T] are those of all texts.

    Texts are compared by the tokens that the model gets: texts that differ only after --max_length are the same.
    """
    starts = np.cumsum(lengths) - lengths
    places = np.arange(len(tokens)) - starts.repeat(lengths)
    mixed = hash64(places.astype(np.uint64), tokens.astype(np.uint64))
    return hash64(np.add.reduceat(mixed, starts)).view(np.int64)


def pack_or_pad_tuples(
    model: Any, train: TextTuples, tokenizer: Any, accelerator: Any, config: Any
) -> tuple[TupleCollate, str]:
    """The collate function of samples, and a description for the user: see `pack_or_pad_texts`.

    Raises:
        UserError: see `pack_or_pad_texts`.
    """
    of_texts, described = pack_or_pad_texts(model, train.columns[0], tokenizer, accelerator, config)
    return TupleCollate(of_texts, len(train.columns)), described
