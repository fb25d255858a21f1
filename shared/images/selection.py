"""Which images are used: numbers of images in memory-mapped arrays, and functions that choose images block by block."""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from shared.cache.prepared import mapped_file, mask_once, shared_array
from shared.datasets.tables import SUBSET
from shared.plan.draws import Ints, hash64
from shared.plan.splits import hash_limit, share_of_each

BLOCK = 1 << 16  # images whose numbers are read at once

Chosen = Callable[[int, int], NDArray[np.bool_]]  # bool [end - first]: whether the images first ... end - 1 are chosen


def blocks(count: int) -> Iterator[tuple[int, int]]:
    """The images 0 ... count - 1 in blocks: yield the first image of each block, and the first one after it."""
    for first in range(0, count, BLOCK):
        yield first, min(first + BLOCK, count)


def numbers(count: int) -> Ints:
    """int64 [count]: 0 ... count - 1. The array is memory-mapped if it is large: see `shared_array`."""
    return shared_array(lambda: (np.arange(*block) for block in blocks(count)), np.int64)


def taken(values: Ints, chosen: Chosen | Ints) -> Ints:
    """The entries of `values` [N] of the images `chosen`; memory-mapped if they are many and `chosen` is a function."""
    if not callable(chosen):
        return values[chosen]
    return shared_array(lambda: (values[first:end][chosen(first, end)] for first, end in blocks(len(values))), np.int64)


def chosen_by_limit(count: int, most: int, seed: int) -> Chosen:
    """The `most` of `count` images that `tables.subset` chooses for --max_train_samples or --max_eval_samples."""
    largest = hash_limit(count, most, seed, SUBSET)
    return lambda first, end: hash64(seed, SUBSET, np.arange(first, end, dtype=np.uint64)) <= largest


def held_out(targets: Ints, percentage: int, seed: int) -> NDArray[np.bool_]:
    """bool [N]: the result of `share_of_each`; for mapped `targets`, it is mapped and computed once per machine."""
    share = partial(share_of_each, targets, percentage, seed)
    if (file := mapped_file(targets)) is None:
        return share()
    key = hashlib.blake2b(repr((file.parent.name, percentage, seed)).encode(), digest_size=16)
    return mask_once(f"held-out-images-{key.hexdigest()}", len(targets), share)
