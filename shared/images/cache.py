"""The cache of `--cache uint8`: images decoded once into a memory map, and a list of the corrupt ones."""

import hashlib
import json
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import IO

import numpy as np
import PIL
from numpy.typing import NDArray

from shared.cache.blocks import Blocks, move_or_link, opened_before_end
from shared.cache.prepared import ahead_of_training, array_writer, read_array
from shared.images.decoding import CorruptImage, Pixels, Square, decode
from shared.images.selection import blocks
from shared.images.sources import Source

FORMAT = 3  # part of the cache's name: increase it when the files written for the same images change
SMALLEST_BLOCK = 64  # images: about 0.2 s of one core


def build(source: Source, square: Square, keep_pixels: bool) -> Path:
    """Decode the images of a source to squares, unless this machine has done so before; return the folder.

    With `keep_pixels` False the folder holds only the aspect ratios and the list of corrupt images. All processes that
    call this divide the images (see `blocks.py`), and each decodes in as many threads as its share of the cores. Pixels
    that are decoded ahead of training do not stay in memory, where other programs could need the room.

    Raises:
        UserError: an image cannot be read, or the cache cannot be written.
        Unfinished: the share of this task is decoded, and that of another task is not.
    """

    size = square.size
    read_soon = not ahead_of_training()  # asked here, because the threads that write do not know

    def begin(shared: Path) -> None:
        if keep_pixels:
            np.lib.format.open_memmap(shared / "pixels.npy", "w+", np.uint8, (len(source), size, size, 3))

    def write(shared: Path, folder: Path, images: range) -> None:
        aspects, corrupt = np.ones(len(images), np.float32), []
        to_end = (len(source) - images.start) * size * size * 3
        opened: AbstractContextManager[IO[bytes] | None] = nullcontext()
        if keep_pixels:
            opened = opened_before_end(shared / "pixels.npy", to_end, read_soon)
        with opened as pixels:
            for place, i in enumerate(images):
                try:
                    image, aspects[place] = decode(source.stored(i), square)
                except CorruptImage as problem:
                    image = np.zeros((size, size, 3), np.uint8)
                    corrupt.append((i, str(problem)))
                if pixels:
                    pixels.write(image.data)
        np.save(folder / "aspects.npy", aspects)
        (folder / "corrupt.json").write_text(json.dumps(corrupt))

    def join(shared: Path, folder: Path, parts: list[Path]) -> None:
        with array_writer(folder / "aspects.npy", np.float32) as append:
            for part in parts:
                append(np.load(part / "aspects.npy"))
        (folder / "corrupt.json").write_text(json.dumps([*chain.from_iterable(map(corrupt_images, parts))]))
        if keep_pixels:
            move_or_link(shared / "pixels.npy", folder)

    settings = (FORMAT, PIL.__version__, square, keep_pixels, source.key)
    name = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for first, end in blocks(len(source)):
        name.update(np.ascontiguousarray(source.rows[first:end]).data)
    arguments = len(source), SMALLEST_BLOCK, write, join, "decoding", "images", source.name, begin
    return Blocks(f"images-{name.hexdigest()}", *arguments).build()


def read(folder: Path) -> tuple[Pixels, NDArray[np.float32]]:
    """Return the memory-mapped pixels, uint8 [N, size, size, 3], and the aspect ratios (width / height), [N]."""
    return np.load(folder / "pixels.npy", mmap_mode="r"), read_array(folder / "aspects.npy")


def corrupt_images(folder: Path) -> list[tuple[int, str]]:
    """Return (image number, error text) of each image that could not be decoded."""
    return [(i, problem) for i, problem in json.loads((folder / "corrupt.json").read_text())]
