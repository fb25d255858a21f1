"""Arrays made from tagged texts, in the cache: all processes make them together, in blocks of texts."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from shared.cache.blocks import Blocks
from shared.cache.prepared import Arrays, arrays_writer, read_array

SMALLEST_BLOCK = 4096  # texts; the default data are one block
BATCH_TEXTS = 1000
BATCH_WORDS = 1 << 14  # in a batch, or one text; limits the memory of the tokenizer


def make_arrays(
    name: str,
    texts: int,
    make: Callable[[range], Iterator[Arrays]],
    places: Mapping[str, str],
    verb: str,
    source: str,
    delay: float = 5,
    by_task: bool = False,
) -> Path:
    """The folder `name` of the cache with a .npy file for each array, made by all processes that call this.

    The files are the same for any number of processes.

    Args:
        name: contains a digest of everything that the arrays depend on.
        texts: the number of texts.
        make: yields arrays [n] for consecutive batches of a range of texts. Places in an array count from the
            beginning of the batch.
        places: {array of places: the array in which they are places}.
        verb: of the progress bar: "tokenizing".
        source: where the texts come from, in messages.
        delay: seconds until the progress bar is shown.
        by_task: whether the tasks of a job array divide the work (see `Blocks`).

    Raises:
        UserError: the cache cannot be written, or `make` raises it.
        Unfinished: the share of this task is complete, and that of another task is not.
    """

    def write(_: Path, folder: Path, block: range) -> None:
        with arrays_writer(folder, places) as append:
            for arrays in make(block):
                append(arrays)

    def join(_: Path, folder: Path, blocks: list[Path]) -> None:
        with arrays_writer(folder, places) as append:
            for block in blocks:
                append({path.stem: read_array(path) for path in sorted(block.glob("*.npy"))})

    arguments = name, texts, SMALLEST_BLOCK, write, join, verb, "texts", source
    return Blocks(*arguments, delay=delay, most_threads=1, by_task=by_task).build()  # tokenizers have own threads


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
