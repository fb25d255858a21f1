"""Check of encoded images before a run decodes any: a fingerprint of each, and which are corrupt by their headers.

Each image is opened once per machine. Later starts read the stored result, as long as the file times or the bytes of
the table are the same.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm import tqdm

from shared.datasets.prepared import build_once, read_array
from shared.images.decoding import CorruptImage, inspect

FORMAT = 1  # part of the cache's name: increase it when the check finds other things in the same images
DEEP = ("I", "F")  # Pillow's modes of more than 8 bits, such as I;16
HASHED = 1 << 30  # bytes of a table's images that each start hashes; if there are more, it hashes evenly spaced blocks
PIECE = 1 << 16
AT_ONCE = 1 << 12  # images that wait for a thread; each takes 2 kB

Found = TypeVar("Found")


@dataclass(frozen=True)
class Checked:
    """The result of `check` for the M encoded images of a source."""

    key: str  # identifies the encoded images on this machine
    prints: NDArray[np.uint64]  # [M] fingerprint of each image: see `decoding.inspect`
    problems: Mapping[int, str]  # error text by the number of the corrupt image
    deep: tuple[int, ...]  # numbers of the images with more than 8 bits per channel


def check(key: str, count: int, stored: Callable[[int], bytes | Path], name: str) -> Checked:
    """Read the headers of `count` images, or the stored result if this machine has checked the same `key` before.

    Args:
        key: see `key_of_files` and `key_of_column`.
        stored: returns the encoded image number i: its bytes or its path.
        name: name of the source, for the progress bar.

    Raises:
        UserError: a file cannot be read.
    """

    def write(folder: Path) -> None:
        def inspect_one(i: int) -> tuple[int, str, str]:
            try:
                return *inspect(stored(i)), ""
            except CorruptImage as problem:
                return problem.args[1], "", problem.args[0]

        prints = np.lib.format.open_memmap(folder / "prints.npy", "w+", np.uint64, (count,))
        problems: dict[int, str] = {}
        deep = []
        results = in_threads(inspect_one, count, 2 * len(os.sched_getaffinity(0)))  # they wait for the disk
        bar = tqdm(results, f"checking {name}", count, unit=" images", mininterval=0.5, delay=2)
        for i, (fingerprint, mode, problem) in enumerate(bar):
            prints[i] = fingerprint
            if problem:
                problems[i] = problem
            if mode.startswith(DEEP):
                deep.append(i)
        prints.flush()
        (folder / "found.json").write_text(json.dumps({"problems": problems, "deep": deep}))

    settings = hashlib.blake2b(f"{FORMAT} {PIL.__version__} {key}".encode(), digest_size=16)
    folder = build_once(f"checked-{settings.hexdigest()}", write)
    found = json.loads((folder / "found.json").read_text())
    problems = {int(i): problem for i, problem in found["problems"].items()}
    return Checked(key, read_array(folder / "prints.npy"), problems, tuple(found["deep"]))


def in_threads(compute: Callable[[int], Found], count: int, threads: int) -> Iterator[Found]:
    """Yield the results for 0 ... count - 1 in order. The executor's own `map` would submit all of them at once."""
    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, count, AT_ONCE):
            yield from pool.map(compute, range(first, min(first + AT_ONCE, count)))


def key_of_files(paths: Iterable[str]) -> str:
    """A hash of the files' absolute paths, sizes and times on this machine: it changes when a file changes.

    The time of change (ctime) is included because copying and unpacking can set back the time of modification.
    """
    state = hashlib.blake2b(digest_size=16)
    for path in paths:
        stat = os.stat(path)  # noqa: PTH116  Path.stat takes longer
        entry = path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        state.update(repr(entry).encode())
    return state.hexdigest()


def key_of_column(column: pa.ChunkedArray) -> str:
    """A hash of a column of encoded images: all lengths and bytes, or a sample of the bytes beyond 1 GiB."""
    state = hashlib.blake2b(digest_size=16)
    chunks = [chunk.cast(pa.large_binary()) for chunk in column.chunks]
    lengths = [np.asarray(pc.binary_length(chunk).fill_null(-1)) for chunk in chunks]
    pieces_apart = max(1, -(-sum(int(part.clip(0).sum()) for part in lengths) // HASHED))
    for chunk, part in zip(chunks, lengths, strict=True):
        state.update(part.tobytes())
        _, offsets, content = chunk.buffers()
        if content is not None and len(chunk):
            ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1].tolist()
            for start in range(ends[0], ends[-1], PIECE * pieces_apart):
                state.update(memoryview(content)[start : min(start + PIECE, ends[-1])])
    return state.hexdigest()
