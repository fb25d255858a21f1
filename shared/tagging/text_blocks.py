"""Arrays made from tagged texts, in the cache: all processes make them together, in blocks of texts."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shared.cache.division import Division, parts_of
from shared.cache.prepared import Arrays

SMALLEST_BLOCK = 4096  # texts; the default data are one block
BATCH_TEXTS = 1000
BATCH_WORDS = 1 << 14  # in a batch, or one text; limits the memory of the tokenizer


def make_arrays(
    name: str,
    texts: int,
    make: Callable[[range], Iterator[Arrays]],
    places: Mapping[str, str],
    title: str,
    delay: float = 5,
    by_task: bool = False,
) -> Path:
    """The folder `name` of the cache with the arrays that `make` yields for batches of texts: see `Division`."""
    parts = parts_of(texts, SMALLEST_BLOCK, make)
    return Division(name, parts, title, places, delay=delay, by_task=by_task).build()  # tokenizers have own threads


def batches_of(lists: pa.ChunkedArray, texts: range) -> Iterator[tuple[int, pa.LargeListArray]]:
    """The words or tags of a range of texts in batches, each with the number of its first text."""
    for start in range(texts.start, texts.stop, BATCH_TEXTS):
        part = lists.slice(start, min(BATCH_TEXTS, texts.stop - start)).combine_chunks()
        ends = np.cumsum(sizes_of(part))
        cuts = np.flatnonzero(np.diff(ends // BATCH_WORDS)) + 1
        for first, end in pairwise([0, *cuts.tolist(), len(part)]):
            yield start + first, part.slice(first, end - first)


def sizes_of(lists: pa.Array) -> NDArray[np.int64]:
    """int64 [texts]: the lengths of lists."""
    return np.asarray(pc.list_value_length(lists)).astype(np.int64)


def begins_of(sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [words]: whether a word is the first of its text; a text may have no words. `sizes`: words of each text."""
    found = np.zeros(sizes.sum(), bool)
    found[(np.cumsum(sizes) - sizes)[sizes > 0]] = True
    return found
