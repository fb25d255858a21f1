"""The cache of `--cache uint8`: images decoded once per machine into a memory map, and a list of the corrupt ones."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import PIL
from numpy.typing import NDArray
from tqdm import tqdm

from shared.datasets.prepared import build_once, read_array
from shared.images.checks import in_threads
from shared.images.decoding import CorruptImage, Pixels, decode
from shared.images.selection import blocks
from shared.images.sources import Source

FORMAT = 2  # part of the cache's name: increase it when the files written for the same images change


def build(source: Source, size: int, interpolation: str, keep_pixels: bool) -> Path:
    """Decode the images of a source to squares of `size`, unless this machine has done so before; return the folder.

    With `keep_pixels` False the folder holds only the aspect ratios and the list of corrupt images. One thread per core
    of this process decodes: Pillow releases the GIL.
    """

    def write(folder: Path) -> None:
        shape = (len(source), size, size, 3)
        pixels = np.lib.format.open_memmap(folder / "pixels.npy", "w+", np.uint8, shape) if keep_pixels else None
        aspects = np.lib.format.open_memmap(folder / "aspects.npy", "w+", np.float32, (len(source),))
        aspects[:] = 1
        corrupt: list[tuple[int, str]] = []

        def decode_one(i: int) -> tuple[int, str] | None:
            try:
                square, aspects[i] = decode(source.stored(i), size, interpolation)
            except CorruptImage as problem:
                return i, str(problem)
            if pixels is not None:
                pixels[i] = square
            return None

        decoded = in_threads(decode_one, len(source), len(os.sched_getaffinity(0)))
        for problem in tqdm(decoded, f"decoding {source.name}", len(source), unit=" images", mininterval=0.5):
            corrupt += [problem] if problem else []
        if pixels is not None:
            pixels.flush()
        aspects.flush()
        (folder / "corrupt.json").write_text(json.dumps(corrupt))

    settings = (FORMAT, PIL.__version__, size, interpolation, keep_pixels, source.key())
    name = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for first, end in blocks(len(source)):
        name.update(np.ascontiguousarray(source.rows[first:end]).data)
    return build_once(f"images-{name.hexdigest()}", write)


def read(folder: Path) -> tuple[Pixels, NDArray[np.float32]]:
    """Return the memory-mapped pixels, uint8 [N, size, size, 3], and the aspect ratios (width / height), [N]."""
    return np.load(folder / "pixels.npy", mmap_mode="r"), read_array(folder / "aspects.npy")


def corrupt_images(folder: Path) -> list[tuple[int, str]]:
    """Return (image number, error text) of each image that could not be decoded."""
    return [(i, problem) for i, problem in json.loads((folder / "corrupt.json").read_text())]
