"""The cache of `--cache uint8`: images decoded once into a memory map, and a list of the corrupt ones."""

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np
import PIL
from numpy.typing import NDArray

from shared.cache.division import Division, blocks_folder, cores_of_process, opened_before_end, parts_of
from shared.cache.prepared import Arrays, as_lines, from_lines, read_array
from shared.images.decoding import CorruptImage, Pixels, Square, decode
from shared.images.selection import blocks
from shared.images.sources import Source

FORMAT = 4  # part of the cache's name: increase it when the files written for the same images change
PIXELS = "pixels.npy"
SMALLEST_BLOCK = 64  # images: about 0.2 s of one core


def build(source: Source, square: Square, keep_pixels: bool) -> Path:
    """Decode the images of a source to squares, unless this machine has done so before; return the folder.

    With `keep_pixels` False the folder holds only the aspect ratios and the list of corrupt images. All processes that
    call this divide the images (see `division.py`), and each decodes in as many threads as its share of the cores.

    Raises:
        UserError: an image cannot be read, or the cache cannot be written.
        Unfinished: the share of this task is decoded, and that of another task is not.
    """
    size = square.size
    settings = (FORMAT, PIL.__version__, square, keep_pixels, source.key)
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for first, end in blocks(len(source)):
        digest.update(np.ascontiguousarray(source.rows[first:end]).data)
    name = f"images-{digest.hexdigest()}"

    def create(file: Path) -> None:
        np.lib.format.open_memmap(file, "w+", np.uint8, (len(source), size, size, 3))

    def make(images: range) -> Iterator[Arrays]:
        aspects, corrupt = np.ones(len(images), np.float32), []
        to_end = (len(source) - images.start) * size * size * 3
        opened: AbstractContextManager[IO[bytes] | None] = nullcontext()
        if keep_pixels:
            opened = opened_before_end(blocks_folder(name) / PIXELS, to_end)
        with opened as pixels:
            for place, i in enumerate(images):
                try:
                    image, aspects[place] = decode(source.stored(i), square)
                except CorruptImage as problem:
                    image = np.zeros((size, size, 3), np.uint8)
                    corrupt.append((i, str(problem)))
                if pixels:
                    pixels.write(image.data)
        yield {"aspects": aspects, "corrupt": as_lines(corrupt)}

    division = Division(
        name, parts_of(len(source), SMALLEST_BLOCK, make), f"decoding {source.name}", threads=cores_of_process()
    )
    return (replace(division, file=PIXELS, create=create) if keep_pixels else division).build()


def read(folder: Path) -> tuple[Pixels, NDArray[np.float32]]:
    """Return the memory-mapped pixels, uint8 [N, size, size, 3], and the aspect ratios (width / height), [N]."""
    return np.load(folder / PIXELS, mmap_mode="r"), read_array(folder / "aspects.npy")


def corrupt_images(folder: Path) -> list[tuple[int, str]]:
    """Return (image number, error text) of each image that could not be decoded."""
    return [(i, problem) for i, problem in from_lines(folder / "corrupt.npy")]
