"""Check of encoded images before a run decodes any: a fingerprint of each, and which are corrupt by their headers.

All processes divide the images (see `division.py`). Later starts read the stored result, as long as the file times or
the bytes of the table are the same.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import pyarrow as pa
from numpy.typing import NDArray

from shared.cache.division import Division, cores_of_process, parts_of
from shared.cache.prepared import Arrays, as_lines, from_lines, key_digest, read_array
from shared.datasets.rows import content_of
from shared.images.decoding import inspect

FORMAT = 2  # part of the cache's name: increase it when the check finds other things in the same images
SMALLEST_BLOCK = 256  # images: a few hundredths of a second of one core
DEEP = ("I", "F")  # Pillow's modes of more than 8 bits, such as I;16


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

    def make(images: range) -> Iterator[Arrays]:
        prints, remarks = np.empty(len(images), np.uint64), []
        for place, i in enumerate(images):
            prints[place], mode, problem = inspect(stored(i))
            if problem or mode.startswith(DEEP):
                remarks.append((i, problem))
        yield {"prints": prints, "remarks": as_lines(remarks)}

    folder = Division(
        f"checked-{key_digest(FORMAT, PIL.__version__, key)}",
        parts_of(count, SMALLEST_BLOCK, make),
        f"checking {name}",
        threads=2 * cores_of_process(),  # they wait for the disk
        delay=2,
        by_task=False,  # all images are checked before one is decoded
    ).build()
    remarks = from_lines(folder / "remarks.npy")
    problems = {i: problem for i, problem in remarks if problem}
    deep = tuple(i for i, problem in remarks if not problem)
    return Checked(key, read_array(folder / "prints.npy"), problems, deep)


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


def key_of_column(table: pa.Table, name: str, cells: pa.ChunkedArray) -> str:
    """A hash of the encoded images `cells` in a column; of a memory-mapped table, that of its rows, which is known."""
    if content := content_of(table):
        return key_digest(content, name)
    state = hashlib.blake2b(digest_size=16)
    for cell in cells:
        image = cell.as_py() or b""
        state.update(f"{len(image)} ".encode() + image)
    return state.hexdigest()
