"""Selects rows by hash: a number of them, or a share of each label."""

import numpy as np
from numpy.typing import NDArray

from shared.plan.draws import hash64


def smallest(count: int, most: int, *words: int) -> NDArray[np.bool_]:
    """bool [count], the `most` (at least 1) rows with the smallest hashes of (*words, row), which are unique."""
    hashes = hash64(*words, np.arange(count, dtype=np.uint64))
    return hashes <= np.partition(hashes, most - 1)[most - 1]


def share_of_each(targets: NDArray, percentage: int, seed: int) -> NDArray[np.bool_]:
    """bool [N], the rows to hold out: `percentage` of each label, rounded to a row; a function of the arguments only.

    At least one row of each label stays in training. With several labels per row (targets [N, labels] of 0 and 1), the
    share is that of each combination of labels.

    With the rows sorted by label, and in each label by hash, these are the rows at which the rounded share grows.
    """
    several = targets.ndim > 1
    rows, axis = (np.packbits(targets > 0, axis=1), 0) if several else (targets, None)
    groups, first_rows, group_of = np.unique(rows, axis=axis, return_index=True, return_inverse=True)
    places = np.arange(len(targets))
    held_out = np.empty(len(targets), bool)
    order = np.lexsort((hash64(seed, places.astype(np.uint64)), group_of))
    held_out[order] = (places + 1) * percentage // 100 > places * percentage // 100
    # If all rows with a label are held out, the first of them returns to training.
    members = [np.flatnonzero(row) for row in np.unpackbits(groups, axis=1)] if several else groups[:, None]
    labels_of = [labels.tolist() for labels in members]
    kept = {label for group in np.unique(group_of[~held_out]) for label in labels_of[group]}
    first: dict[int, int] = {}  # row with each label
    for row, labels in sorted(zip(first_rows.tolist(), labels_of, strict=True), reverse=True):
        first |= dict.fromkeys(labels, row)
    for label in sorted({*first} - kept):
        if label not in kept:
            held_out[first[label]] = False
            kept |= {*labels_of[group_of[first[label]]]}
    return held_out
