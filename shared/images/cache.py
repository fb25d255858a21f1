"""What this machine knows of encoded images: their fingerprints, the corrupt ones, and with `--cache uint8` all pixels.

All processes divide the images (see `division.py`). Later starts read the stored results, as long as the times of the
files or the bytes of the table are the same.
"""

import hashlib
import os
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import PIL
import torch
from numpy.typing import NDArray

from shared.cache.division import Division, cores_of_process, parts_of
from shared.cache.prepared import Arrays, key_digest, read_array
from shared.images.decoding import CorruptImage, Pixels, Square, decode, inspect
from shared.plan.draws import Ints

CHECK_FORMAT = 3  # part of the cache's name: increase it when the check finds other things in the same images
FORMAT = 7  # part of the cache's name: increase it when the files written for the same images change
SMALLEST_CHECKED = 256  # images: a few hundredths of a second of one core
SMALLEST_BLOCK = 64  # images: about 0.2 s of one core
DEEP = ("I", "F")  # Pillow's modes of more than 8 bits, such as I;16

Stored = Callable[[int], bytes | Path]  # returns the encoded image number i: its bytes or its path


@dataclass(frozen=True)
class Checked:
    """The result of `check_images` for the M encoded images of a source."""

    key: str  # identifies the encoded images on this machine
    prints: NDArray[np.uint64]  # [M] fingerprint of each image: see `decoding.inspect`
    corrupt: Ints  # numbers of the images that are corrupt
    deep: Ints  # numbers of the others with more than 8 bits per channel
    folder: str = ""  # the deepest folder that contains all files; "" if the images are not in files


def check_images(key: str, count: int, stored: Stored, name: str, whole: bool = False) -> Checked:
    """Read the headers of `count` images, or the stored result if this machine has checked the same `key` before.

    Args:
        key: changes when one of the images does, such as `key_of_files`.
        name: name of the source, for the progress bar.
        whole: decode the images, too, which finds all that are corrupt.

    Raises:
        UserError: a file cannot be read.
    """

    def make(images: range) -> Iterator[Arrays]:
        found = [inspect(stored(i), whole) for i in images]
        corrupt = [i for i, (_, _, problem) in zip(images, found, strict=True) if problem]
        deep = [i for i, (_, mode, problem) in zip(images, found, strict=True) if not problem and mode.startswith(DEEP)]
        prints = np.array([fingerprint for fingerprint, _, _ in found], np.uint64)
        yield {"prints": prints, "corrupt": np.array(corrupt, np.int64), "deep": np.array(deep, np.int64)}

    folder = Division(
        f"checked-{key_digest(CHECK_FORMAT, PIL.__version__, whole, key)}",
        parts_of(count, SMALLEST_CHECKED),
        make,
        f"checking {name}",
        threads=2 * cores_of_process(),  # they wait for the disk
        delay=2,
        by_task=False,  # all images are checked before one is decoded to pixels
    ).build()
    prints, corrupt, deep = (read_array(folder / f"{name}.npy") for name in ("prints", "corrupt", "deep"))
    return Checked(key, prints, corrupt, deep)


def key_of_files(paths: Iterable[str]) -> tuple[str, str]:
    """A hash of the files' absolute paths, sizes and times on this machine, and the deepest folder that has them all.

    The hash changes when a file changes. The time of change (ctime) is included because copying and unpacking can set
    back the time of modification.
    """
    state, folders = hashlib.blake2b(digest_size=16), set()
    for path in paths:
        stat = os.stat(path)  # noqa: PTH116  Path.stat takes longer
        entry = path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        state.update(repr(entry).encode())
        folders.add(os.path.dirname(path))  # noqa: PTH120  Path.parent takes longer
    return state.hexdigest(), os.path.commonpath(folders) if folders else ""


class Squares:
    """Decoded images, uint8 [N, size, size, 3], in memory-mapped arrays, some of which may be empty."""

    def __init__(self, parts: Sequence[Pixels]) -> None:
        self.parts = parts
        self.starts = [*accumulate(map(len, parts), initial=0)]

    def __getitem__(self, images: int | Ints) -> Pixels:
        """An image, [size, size, 3], or all with these numbers, [n, size, size, 3]."""
        if isinstance(images, np.ndarray):
            return np.stack([self[i] for i in images.tolist()])
        part = bisect(self.starts, images) - 1
        return self.parts[part][images - self.starts[part]]


def build(key: str, count: int, stored: Stored, name: str, square: Square) -> tuple[Squares, NDArray[np.float32], Ints]:
    """Decode `count` images to squares, unless this machine has done so before with the same `key`: see `check_images`.

    All processes that call this divide the images, and each decodes in as many threads as its share of the cores.

    Returns:
        The squares of the images that are not corrupt, memory-mapped; their aspect ratios (width / height), float32;
        the numbers of the corrupt images.

    Raises:
        UserError: an image cannot be read, or the cache cannot be written.
        Unfinished: the share of this task is decoded, and that of another task is not.
    """

    def make(images: range) -> Iterator[Arrays]:
        corrupt = []
        for i in images:
            try:
                pixels, aspect = decode(stored(i), square)
                yield {"pixels": pixels[None], "aspects": np.array([aspect], np.float32)}
            except CorruptImage:
                corrupt.append(i)
        # Without this, a block of corrupt images would lack two files.
        yield {"pixels": np.empty((0, square.size, square.size, 3), np.uint8), "aspects": np.empty(0, np.float32)}
        yield {"corrupt": np.array(corrupt, np.int64)}

    folder = f"images-{key_digest(FORMAT, PIL.__version__, square, key)}"
    parts, threads = parts_of(count, SMALLEST_BLOCK), cores_of_process()
    blocks = Division(folder, parts, make, f"decoding {name}", threads=threads).blocks()
    aspects, corrupt = (
        np.concatenate([np.load(block / f"{name}.npy") for block in blocks]) for name in ("aspects", "corrupt")
    )
    return Squares([mapped(block / "pixels.npy") for block in blocks]), aspects, corrupt


def mapped(path: Path) -> Pixels:
    """The uint8 array of a .npy file, memory-mapped. Unlike a memory map of NumPy, this one keeps no file open."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, _ = np.lib.format.read_array_header_1_0(file)
        start = file.tell()
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)  # reads nothing ahead
    return whole.numpy()[start:].reshape(shape)
