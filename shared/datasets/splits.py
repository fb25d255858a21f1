"""Selects rows by hash: a number of them, or a share of each label."""

from collections.abc import Iterator
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shared.cache.prepared import shared_array
from shared.plan.draws import Ints, hash64

BLOCK = 1 << 20  # rows that are hashed at once
SORTED = 1 << 24  # rows that are sorted at once
BIN_BITS = 16  # of a hash, for a histogram

Hashes = NDArray[np.uint64]


def _blocks(count: int, *words: int) -> Iterator[tuple[int, Hashes]]:
    """The hashes of (*words, row) of the rows 0 ... count-1, in blocks, each with its first row."""
    for start in range(0, count, BLOCK):
        yield start, hash64(*words, np.arange(start, min(start + BLOCK, count), dtype=np.uint64))


def hash_limit(count: int, most: int, *words: int) -> np.uint64:
    """The largest of the `most` smallest hashes of (*words, row) of the rows 0 ... count-1; hashes are unique.

    The memory does not grow with `count` or `most`: a histogram finds a narrow range of hashes with the limit.
    """
    assert 0 < most <= count
    shift = np.uint64(64 - BIN_BITS)
    sizes = np.zeros(1 << BIN_BITS, np.int64)
    for _, hashes in _blocks(count, *words):
        sizes += np.bincount((hashes >> shift).astype(np.int64), minlength=len(sizes))
    ends = sizes.cumsum()
    place = int(np.searchsorted(ends, most))
    inside = np.concatenate([hashes[hashes >> shift == place] for _, hashes in _blocks(count, *words)])
    rank = most - int(ends[place] - sizes[place]) - 1
    return np.uint64(np.partition(inside, rank)[rank])


def share_of_each(targets: NDArray, percentage: int, seed: int) -> NDArray[np.bool_]:
    """bool [N], the rows to hold out: `percentage` of each label, rounded to a row; a function of the arguments only.

    At least one row of each label stays in training. With several labels per row (targets [N, labels] of 0 and 1), the
    share is that of each combination of labels.

    With the rows sorted by label, and in each label by hash, these are the rows at which the rounded share grows. They
    are sorted in parts, one range of hashes after the other. The memory grows with N only by the result.
    """
    count, held_out = len(targets), np.zeros(len(targets), bool)
    group_of = _groups_of(targets)
    sizes = np.zeros(int(group_of.max()) + 1, np.int64)
    for start in range(0, count, BLOCK):
        sizes += np.bincount(group_of[start : start + BLOCK], minlength=len(sizes))
    next_place = sizes.cumsum() - sizes  # of each group, in the sorted order
    parts = max(1, -(-count // SORTED))

    def part_of(hashes: Hashes) -> Hashes:
        return (hashes >> np.uint64(32)) * np.uint64(parts) >> np.uint64(32)

    for part in range(parts):
        rows = np.concatenate([start + np.flatnonzero(part_of(block) == part) for start, block in _blocks(count, seed)])
        rows = rows[np.lexsort((hash64(seed, rows.astype(np.uint64)), group_of[rows]))]
        group = group_of[rows]
        in_part = np.bincount(group, minlength=len(sizes))
        places = np.arange(len(rows)) + (next_place - in_part.cumsum() + in_part)[group]
        next_place += in_part
        held_out[rows] = (places + 1) * percentage // 100 > places * percentage // 100
    _keep_each_label(targets, held_out)
    return held_out


def _groups_of(targets: NDArray) -> Ints:
    """int64 [N], memory-mapped if there are many: the number of each row's label, or of its combination of labels."""
    if targets.ndim == 1:
        return targets

    def combinations() -> Iterator[list[bytes]]:
        for start in range(0, len(targets), BLOCK):
            packed = np.packbits(targets[start : start + BLOCK] > 0, axis=1)
            yield packed.view(f"V{packed.shape[1]}")[:, 0].tolist()

    numbers = {row: number for number, row in enumerate(sorted({*chain.from_iterable(combinations())}))}
    return shared_array(lambda: (np.array([numbers[row] for row in rows]) for rows in combinations()), np.int64)


def _keep_each_label(targets: NDArray, held_out: NDArray[np.bool_]) -> None:
    """Return the first row with a label to training if all rows with that label are held out."""
    several = targets.ndim > 1
    kept = np.zeros(targets.shape[1] if several else 0, np.int64)
    first: dict[int, int] = {}  # the first row with each label
    for start in range(0, len(targets), BLOCK):
        block, held = targets[start : start + BLOCK], held_out[start : start + BLOCK]
        rows, labels = np.nonzero(block) if several else (np.arange(len(block)), block)
        more = np.bincount(labels[~held[rows]], minlength=max(len(kept), int(labels.max(initial=-1)) + 1))
        more[: len(kept)] += kept
        kept = more
        for label, row in zip(*np.unique(labels, return_index=True), strict=True):
            first.setdefault(int(label), start + int(rows[row]))
    for label in sorted(first):
        if not kept[label]:
            row = first[label]
            held_out[row] = False
            kept[np.flatnonzero(targets[row]) if several else targets[row]] += 1
