"""A corpus as tokens with the offsets of its documents: streamed to disk once, then memory-mapped.

The files contain the documents' own tokens only. Documents are cut into pieces, and special tokens are added, when the
files are read, so the same files work for every --max_length.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch.utils.data import Dataset

from shared.cache.division import parts_by_size
from shared.cache.prepared import Arrays, build_once, key_digest, ranges, read_array, text_once, write_arrays
from shared.datasets.rows import ROW_COLUMN, blocks_of, content_of, named, source_of, with_content
from shared.errors import UserError, say
from shared.plan.batches import MicroBatch
from shared.plan.draws import Ints
from shared.text.masking import Masking
from shared.text.remote_tokens import RemoteTokens, begun_ahead
from shared.text.tokenized import Rows, room_for_text, tokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGESTED = 1 << 20  # lengths of documents that are digested at once
FORMAT = 3  # part of the names of pieces in the cache: increase it when the files for the same input change
BLOCK_PIECES = 1 << 18  # about so many pieces are cut at once


@dataclass(frozen=True)
class Corpus:
    """The tokens of all documents of a corpus, on this machine or behind a URL."""

    folder: Path  # on this machine
    digest: str  # of the tokens and of the lengths of the documents
    remote: RemoteTokens | None = None  # the tokens, if they are not in the folder

    @property
    def offsets(self) -> Ints:
        """int64 [documents + 1], memory-mapped: where each document begins in `tokens`, and the end of `tokens`."""
        return read_array(self.folder / "offsets.npy")

    @property
    def tokens(self) -> NDArray[np.integer] | RemoteTokens:
        """All tokens; slices of them are arrays."""
        return self.remote or read_array(self.folder / "tokens.npy")

    def documents(self, source: str) -> pa.Table:
        """A row for each document, from which `tables` selects; `source` is the name of the corpus in messages."""
        return with_content(named(pa.table({"begin": self.offsets[:-1]}), source), self.digest)


def tokenize_documents(documents: pa.Table, tokenizer: "PreTrainedTokenizerBase") -> Corpus:
    """The tokens of the documents, without special tokens; "[MASK]" in a text is tokenized as text.

    All processes that call this divide the work: see `Division`. Documents without tokens are skipped, with a message.

    Raises:
        UserError: the documents have no tokens, all tokens are unknown, or the tokenizer is not a fast one.
        Unfinished: see `Division.build`.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} is a slow tokenizer: use a model with a tokenizer.json")
    found = tokenize(documents, documents.column_names, tokenizer, None)
    source, skipped = source_of(documents), documents.num_rows - len(found)
    if not len(found):
        raise UserError(f"{source} contains no text: its {skipped:,} documents have no tokens")
    if skipped:
        say(f"{source}: {skipped:,} documents without text are skipped")
    return Corpus(found.folder, text_once(f"digest-{found.folder.name}", "digest", lambda: _digest(found.folder)))


def _digest(folder: Path) -> str:
    """A digest of the tokens and of the lengths of the documents."""
    content = hashlib.blake2b(read_array(folder / "tokens.npy").data, digest_size=16)
    offsets = read_array(folder / "offsets.npy")
    for start in range(0, len(offsets) - 1, DIGESTED):
        content.update(np.diff(offsets[start : start + DIGESTED + 1]).data)
    return content.hexdigest()


def cut_into_pieces(file: Corpus, documents: pa.Table, room: int, special: int, masking: Masking) -> Path:
    """The folder of the pieces of some of `file.documents`: each has at most `room` tokens of a document.

    The first process of a machine writes them, block by block; the others wait and read. These are memory-mapped arrays
    [pieces]: starts (int64, where each begins in the tokens of the file), lengths (int32, with `special` special
    tokens), and masked (int32, its masked tokens). facts has the number of the longest piece and the sum of lengths.
    """
    offsets, content = file.offsets, content_of(documents)
    assert content, "a selection by `tables` has a digest"

    def blocks() -> Iterator[Arrays]:
        for block in blocks_of(documents):
            numbers = np.asarray(block[ROW_COLUMN])
            begins, lengths = offsets[numbers], offsets[numbers + 1] - offsets[numbers]
            counts = -(-lengths // room)  # the pieces of each document
            for part in parts_by_size(counts, BLOCK_PIECES):
                of_part, count = slice(part.start, part.stop), counts[part.start : part.stop]
                before = ranges(np.zeros_like(count), count) * room  # tokens of the document before each piece
                sizes = np.minimum(np.repeat(lengths[of_part], count) - before, room)
                small = {"lengths": sizes + special, "masked": masking.counts(sizes)}
                yield {"starts": np.repeat(begins[of_part], count) + before} | {
                    name: values.astype(np.int32) for name, values in small.items()
                }

    def build(folder: Path) -> None:
        write_arrays(folder, blocks())
        lengths = read_array(folder / "lengths.npy")
        np.save(folder / "facts.npy", [lengths.argmax() if len(lengths) else 0, lengths.sum(dtype=np.int64)])

    key = key_digest(FORMAT, content, room, special, masking.counts(np.arange(1, room + 1)).tolist())
    return build_once(f"pieces-{key}", build)


class MaskedDocuments(Dataset):
    """Pieces of documents with masked tokens.

    A sample is a piece of at most `max_length` tokens, including special tokens. A longer document continues in the
    next piece, so no token is lost. The targets are the original ids of the masked tokens.

    Args:
        file: the tokens.
        documents: the rows of `file.documents` to use.
        max_length: tokens of a piece.
        around: ids before and after each piece.
        masking: how tokens are chosen and replaced.
        seed: determines the masked tokens, together with epoch and piece.

    Raises:
        UserError: `max_length` leaves no room for text.
    """

    def __init__(
        self,
        file: Corpus,
        documents: pa.Table,
        max_length: int,
        around: tuple[list[int], list[int]],
        masking: Masking,
        seed: int,
    ) -> None:
        self.file = file
        self.before, self.after = (np.array(ids, np.int64) for ids in around)
        self.masking, self.seed = masking, seed
        special = len(self.before) + len(self.after)
        room = room_for_text(max_length, special)
        folder = cut_into_pieces(file, documents, room, special, masking)
        arrays = (read_array(folder / f"{name}.npy") for name in ("starts", "lengths", "masked"))
        self.starts, self.lengths, self.masked = arrays
        self.longest, self.num_tokens = read_array(folder / "facts.npy").tolist()
        self.tokens = file.tokens

    def __len__(self) -> int:
        return len(self.lengths)

    def digest(self) -> str:
        """A digest of the tokens of all documents and the number of pieces: different data have a different digest."""
        return f"{self.file.digest}-{len(self)}"

    @property
    def read_ahead(self) -> Callable[[Iterable[MicroBatch]], Iterator[MicroBatch]] | None:
        """For the loader: begin to read the micro-batches of a schedule in advance. None: they are on this machine."""
        return partial(begun_ahead, self.prefetch) if self.file.remote else None

    def prefetch(self, samples: Ints) -> None:
        """Begin to read the pieces `samples` [pieces], if the tokens are not on this machine."""
        if self.file.remote:
            self.file.remote.prefetch(self.starts[samples], self._sizes(samples))

    def _sizes(self, samples: Ints | int) -> Any:
        """The tokens of pieces without special tokens."""
        return self.lengths[samples].astype(np.int64) - len(self.before) - len(self.after)

    def __getitem__(self, piece: int) -> Ints:
        """int64 [length]: a piece without masking."""
        first, size = self.starts[piece], self._sizes(piece)
        return np.concatenate([self.before, self.tokens[first : first + size].astype(np.int64), self.after])

    def read_micro_batch(self, samples: Ints, epochs: Ints) -> Rows:
        """The pieces `samples` [pieces], masked for `epochs` [pieces]."""
        sizes = self._sizes(samples)
        lengths = sizes + len(self.before) + len(self.after)
        self.prefetch(samples)
        spans = (self.tokens[start : start + size] for start, size in zip(self.starts[samples], sizes, strict=True))
        tokens = np.concatenate([part for span in spans for part in (self.before, span, self.after)])
        owner = np.repeat(np.arange(len(samples)), sizes)
        place = ranges(np.zeros_like(sizes), sizes)
        where = ranges(np.cumsum(lengths) - lengths + len(self.before), sizes)  # of each token of the texts
        text = tokens[where]
        chosen = self.masking.choose(text, sizes, self.seed, epochs, samples)
        if len(chosen) != self.masked[samples].sum():
            raise UserError(f"{type(self.masking).__name__}.choose: choose as many tokens as counts() says")
        labels, whose = text[chosen], owner[chosen]
        tokens[where[chosen]] = self.masking.replace(labels, self.seed, epochs[whose], samples[whose], place[chosen])
        return Rows(lengths, tokens, targets=labels, masked=where[chosen])
