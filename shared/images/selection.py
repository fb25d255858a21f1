"""Which images are used: the numbers of images in memory-mapped arrays, and masks, of one byte per image."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from shared.cache.prepared import shared_array
from shared.datasets.splits import hash_limit
from shared.plan.draws import Ints, hash64

BLOCK = 1 << 16  # images whose numbers are read at once

Mask = NDArray[np.bool_]  # [N]: whether each image is chosen


def blocks(count: int) -> Iterator[slice]:
    """The images 0 ... count - 1 in blocks."""
    for first in range(0, count, BLOCK):
        yield slice(first, min(first + BLOCK, count))


def numbers(count: int) -> Ints:
    """int64 [count]: 0 ... count - 1. The array is memory-mapped if it is large: see `shared_array`."""
    return shared_array(lambda: (np.arange(block.start, block.stop) for block in blocks(count)), np.int64)


def taken(values: NDArray, chosen: Mask) -> NDArray:
    """The entries of `values` [N] of the images `chosen`; memory-mapped if they are many."""
    return shared_array(lambda: (values[block][chosen[block]] for block in blocks(len(values))), values.dtype)


def chosen_by_hash(count: int, most: int, *words: int) -> Mask:
    """The `most` of `count` images with the smallest hashes of (*words, number), as `tables` chooses rows."""
    limit, mask = hash_limit(count, most, *words), np.empty(count, np.bool_)
    for block in blocks(count):
        mask[block] = hash64(*words, np.arange(block.start, block.stop, dtype=np.uint64)) <= limit
    return mask
