"""The pieces into which the documents of a token file are cut: memory-mapped arrays, made once per machine."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.cache.prepared import arrays_writer, build_once, key_digest, read_array, shared_array
from shared.datasets.splits import chosen_by_hash
from shared.datasets.tables import subset
from shared.plan.draws import Ints
from shared.text.masking import Masking

FORMAT = 2  # part of the cache's names: increase it when the files for the same input change
BLOCK = 1 << 18  # documents that are cut at once; their pieces are about as many


@dataclass(frozen=True)
class Selection:
    """Some documents of a token file: all except those of `numbers`, or only those."""

    numbers: Ints = field(default_factory=lambda: np.empty(0, np.int64))  # ascending
    excluded: bool = True  # whether `numbers` are the documents that are not selected

    def count(self, documents: int) -> int:
        """How many of a file's `documents` are selected."""
        return documents - len(self.numbers) if self.excluded else len(self.numbers)

    def between(self, start: int, end: int) -> Ints:
        """The ascending numbers of the selected documents in `start` ... `end` - 1."""
        inside = self.numbers[slice(*np.searchsorted(self.numbers, (start, end)))]
        return np.setdiff1d(np.arange(start, end), inside, assume_unique=True) if self.excluded else inside

    def limited(self, documents: int, most: int | None, seed: int, flag: str) -> "Selection":
        """At most `most` of the selected documents, chosen by `seed`; `flag` is the one that `most` comes from."""
        if (rows := subset(self.count(documents), most, seed, flag)) is None:
            return self
        if self.excluded:  # each row comes after so many documents that are left out
            numbers = rows + np.searchsorted(self.numbers - np.arange(len(self.numbers)), rows, side="right")
        else:
            numbers = self.numbers[rows]
        return Selection(shared_array(lambda: [numbers], np.int64), excluded=False)


def held_out(digest: str, documents: int, held: int, seed: int) -> Ints:
    """The ascending numbers of the `held` documents that `seed` holds out of the file with this digest: memory-mapped.

    They are those with the smallest hashes of (seed, document). The first process of a machine finds them.
    """

    def build(folder: Path) -> None:
        np.save(folder / "documents.npy", chosen_by_hash(documents, held, seed))

    name = key_digest(FORMAT, digest, documents, held, seed)
    return read_array(build_once(f"held-out-{name}", build) / "documents.npy")


@dataclass(frozen=True)
class Pieces:
    """The pieces of some documents: memory-mapped arrays [N], and the facts that a start would have to search for."""

    starts: Ints  # where each begins in the tokens of the file
    lengths: NDArray[np.int32]  # tokens of each, with special tokens
    masked: NDArray[np.int32]  # masked tokens of each
    longest: int  # the number of the longest
    total: int  # the sum of `lengths`


def cut_into_pieces(
    digest: str, offsets: Ints, selection: Selection, max_length: int, special: int, masking: Masking
) -> Pieces:
    """The pieces of the selected documents: each of at most `max_length` tokens, of which `special` are special.

    The first process of a machine writes them, block by block; the others wait and read.

    Args:
        digest: of the token file.
        offsets: [documents + 1] where each document begins in the tokens, and their end.
        selection: the documents that are used.
        max_length, special: tokens of a piece, and those that are special.
        masking: gives the number of masked tokens.
    """
    room = max_length - special

    def build(folder: Path) -> None:
        with arrays_writer(folder, {}) as append:
            for first, last in _blocks(offsets, room):
                starts, sizes = _cut(offsets, selection.between(first, last), room)
                counts = {"lengths": sizes + special, "masked": masking.counts(sizes)}
                append({"starts": starts} | {name: values.astype(np.int32) for name, values in counts.items()})
        lengths = read_array(folder / "lengths.npy")
        np.save(folder / "facts.npy", [lengths.argmax() if len(lengths) else 0, lengths.sum(dtype=np.int64)])

    settings = (FORMAT, digest, len(offsets), int(offsets[-1]), selection.excluded, room, special, masking.probability)
    key = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    key.update(selection.numbers.data)
    folder = build_once(f"pieces-{key.hexdigest()}", build)
    starts, lengths, masked = (read_array(folder / f"{name}.npy") for name in ("starts", "lengths", "masked"))
    longest, total = read_array(folder / "facts.npy").tolist()
    return Pieces(starts, lengths, masked, longest, total)


def _blocks(offsets: Ints, room: int) -> Iterator[tuple[int, int]]:
    """Yield the first document of each block and the first one after it: about BLOCK pieces, or one document."""
    first, documents = 0, len(offsets) - 1
    while first < documents:
        within = int(np.searchsorted(offsets, offsets[first] + BLOCK * room, side="right")) - 1
        last = min(max(within, first + 1), first + BLOCK, documents)
        yield first, last
        first = last


def _cut(offsets: Ints, documents: Ints, room: int) -> tuple[Ints, Ints]:
    """Where the pieces of documents begin, and how many tokens each has, without special tokens."""
    begins, sizes = offsets[documents], offsets[documents + 1] - offsets[documents]
    pieces = -(-sizes // room)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # of a piece in its document
    starts = np.repeat(begins, pieces) + number * room
    return starts, np.minimum(np.repeat(sizes, pieces) - number * room, room)
