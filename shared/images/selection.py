"""Which images are used: numbers of images in memory-mapped arrays, and functions that choose images block by block."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shared.cache.prepared import key_digest, mapped_file, mask_once, shared_array
from shared.datasets.splits import hash_limit, share_of_each
from shared.plan.draws import Ints, hash64

BLOCK = 1 << 16  # images whose numbers are read at once

Chosen = Callable[[int, int], NDArray[np.bool_]]  # bool [end - first]: whether the images first ... end - 1 are chosen


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """The images 0 ... count - 1 in blocks: yield the first image of each block, and the first one after it."""
    for first in range(0, count, BLOCK):
        yield first, min(first + BLOCK, count)


def numbers(count: int) -> Ints:
    """int64 [count]: 0 ... count - 1. The array is memory-mapped if it is large: see `shared_array`."""
    return shared_array(lambda: (np.arange(*block) for block in blocks(count)), np.int64)


def taken(values: NDArray, chosen: Chosen | Ints) -> NDArray:
    """The entries of `values` [N] of the images `chosen`; memory-mapped if they are many and `chosen` is a function."""
    if not callable(chosen):
        return values[chosen]
    parts = partial(blocks, len(values))
    return shared_array(lambda: (values[first:end][chosen(first, end)] for first, end in parts()), values.dtype)


def chosen_by_hash(count: int, most: int, *words: int) -> Chosen:
    """The `most` of `count` images with the smallest hashes of (*words, number), as `tables` chooses rows."""
    largest = hash_limit(count, most, *words)
    return lambda first, end: hash64(*words, np.arange(first, end, dtype=np.uint64)) <= largest


def held_out(targets: NDArray, percentage: int, seed: int) -> Chosen:
    """The images to hold out: a share of each class (see `share_of_each`), or of all images if `targets` are numbers.

    The choice among mapped `targets` is mapped, too, and computed once per machine.
    """
    count = len(targets)
    if targets.dtype.kind == "f":
        return chosen_by_hash(count, min(max(1, round(count * percentage / 100)), count - 1), seed)
    share = partial(share_of_each, targets, percentage, seed)
    if file := mapped_file(targets):
        mask = mask_once(f"held-out-images-{key_digest(file.parent.name, percentage, seed)}", count, share)
    else:
        mask = share()
    return lambda first, end: mask[first:end]
