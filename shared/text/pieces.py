"""The pieces into which the documents of a token file are cut: memory-mapped arrays, made once per machine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.cache.prepared import arrays_writer, build_once, key_digest, ranges, read_array
from shared.datasets.splits import hash_limit
from shared.datasets.tables import SUBSET, limit
from shared.plan.draws import Ints, hash64
from shared.text.masking import Masking

FORMAT = 3  # part of the cache's names: increase it when the files for the same input change
BLOCK = 1 << 18  # documents that are cut at once; their pieces are about as many


@dataclass(frozen=True)
class Selection:
    """Which documents of a corpus are used: a function of these settings and of the number of documents alone.

    The held-out documents are those with the smallest hashes of (seed, document).
    """

    seed: int = 0
    held: int = 0  # how many documents are held out
    inside: bool = False  # whether these are used, or the others
    most: int | None = None  # how many of them are used; None: all

    def limited(self, documents: int, most: int | None, flag: str) -> "Selection":
        """At most `most` of the used documents out of `documents`; `flag` is the one that `most` comes from."""
        return replace(self, most=limit(self.held if self.inside else documents - self.held, most, flag))

    def numbers(self, documents: int, blocks: Iterable[tuple[int, int]]) -> Iterator[Ints]:
        """Yield the ascending numbers of the used documents in each block (first, end) of all `documents`, in order."""
        rows = self.held if self.inside else documents - self.held
        largest_held = hash_limit(documents, self.held, self.seed) if self.held else None
        largest = None if self.most is None else hash_limit(rows, self.most, self.seed, SUBSET)
        first_row = 0  # of a block, counting the documents before it that `inside` leaves
        for first, end in blocks:
            found = np.arange(first, end)
            if largest_held is not None:
                found = found[(hash64(self.seed, found.astype(np.uint64)) <= largest_held) == self.inside]
            row = np.arange(first_row, first_row + len(found), dtype=np.uint64)
            first_row += len(found)
            yield found if largest is None else found[hash64(self.seed, SUBSET, row) <= largest]


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
            for documents in selection.numbers(len(offsets) - 1, _blocks(offsets, room)):
                starts, sizes = _cut(offsets, documents, room)
                counts = {"lengths": sizes + special, "masked": masking.counts(sizes)}
                append({"starts": starts} | {name: values.astype(np.int32) for name, values in counts.items()})
        lengths = read_array(folder / "lengths.npy")
        np.save(folder / "facts.npy", [lengths.argmax() if len(lengths) else 0, lengths.sum(dtype=np.int64)])

    key = (FORMAT, digest, len(offsets), int(offsets[-1]), selection, room, special, masking.probability)
    folder = build_once(f"pieces-{key_digest(*key)}", build)
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
    number = ranges(np.zeros_like(pieces), pieces)  # of a piece in its document
    starts = np.repeat(begins, pieces) + number * room
    return starts, np.minimum(np.repeat(sizes, pieces) - number * room, room)
