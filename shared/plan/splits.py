"""Selects rows by hash: a number of them, or a share of each label."""

import numpy as np
from numpy.typing import NDArray

from shared.plan.hashing import Ints, hash64

BLOCK = 1 << 20  # rows that are hashed at once


def chosen_by_hash(count: int, most: int, *words: int) -> Ints:
    """The `most` of the rows 0 ... count-1 with the smallest hashes of (*words, row), in ascending order: int64 [most].

    The memory grows with `most` and not with `count`.
    """
    rows, hashes = np.empty(0, np.uint64), np.empty(0, np.uint64)
    size = max(BLOCK, most)
    for start in range(0, count, size):
        block = np.arange(start, min(start + size, count), dtype=np.uint64)
        rows, hashes = np.concatenate([rows, block]), np.concatenate([hashes, hash64(*words, block)])
        if len(rows) > most:
            smallest = np.argpartition(hashes, most)[:most]
            rows, hashes = rows[smallest], hashes[smallest]
    return np.sort(rows.view(np.int64))


def by_class(targets: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """The rows sorted by class, shuffled by `seed` in each class: every fifth of them is a fifth of each class."""
    order = np.argsort(hash64(seed, np.arange(len(targets), dtype=np.uint64)), kind="stable")
    return order[np.argsort(targets[order], kind="stable")]


def share_of_each(targets: NDArray, percentage: int, seed: int) -> NDArray[np.bool_]:
    """bool [N], the rows to hold out: `percentage` of each label, rounded to a row; a function of the arguments only.

    At least one row of each label stays in training. With several labels per row (targets [N, labels] of 0 and 1), the
    share is that of each combination of labels.
    """
    if targets.ndim == 1:
        rows, labels, groups = np.arange(len(targets)), targets, targets
    else:
        rows, labels = np.nonzero(targets)
        groups = np.unique(np.packbits(targets > 0, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    order = by_class(groups, seed)
    places = np.arange(len(order))
    held_out = np.zeros(len(order), bool)
    held_out[order] = (places + 1) * percentage // 100 > places * percentage // 100
    kept = np.bincount(labels[~held_out[rows]], minlength=labels.max(initial=0) + 1)
    for label in np.flatnonzero(np.bincount(labels, minlength=len(kept)) > kept):
        if not kept[label]:
            row = rows[labels == label].min()
            held_out[row] = False
            kept[labels[rows == row]] += 1
    return held_out
