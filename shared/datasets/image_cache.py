"""Images decoded once per machine into a memory map, `--cache uint8`; and what of them could not be decoded."""

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import PIL
import pyarrow as pa
from numpy.typing import NDArray
from tqdm import tqdm

from shared.datasets.cache import build_once
from shared.datasets.decoding import CorruptImage, Pixels, decode
from shared.datasets.image_sources import Source

FORMAT = 1  # raise it when what is written for the same images changes: it is part of the cache's names
SAMPLED = 1000  # encoded images of a table of which the bytes, and not only the length, enter the name


def build(source: Source, size: int, keep_pixels: bool) -> Path:
    """The folder with the images of a source as squares of `size`, or with the list of its corrupt images only.

    Threads decode, as many as there are cores for this process: Pillow does not hold Python's lock.
    """

    def write(folder: Path) -> None:
        shape = (len(source), size, size, 3)
        pixels = np.lib.format.open_memmap(folder / "pixels.npy", "w+", np.uint8, shape) if keep_pixels else None
        aspects, corrupt = np.ones(len(source), np.float32), []

        def one(i: int) -> tuple[int, str] | None:
            try:
                square, aspects[i] = decode(source.stored(i), size)
            except CorruptImage as problem:
                return i, str(problem)
            if pixels is not None:
                pixels[i] = square
            return None

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
            decoded = threads.map(one, range(len(source)))
            for problem in tqdm(decoded, f"decoding {source.name}", len(source), unit=" images", mininterval=0.5):
                corrupt += [problem] if problem else []
        if pixels is not None:
            pixels.flush()
        np.save(folder / "aspects.npy", aspects)
        (folder / "corrupt.json").write_text(json.dumps(corrupt))

    settings = (FORMAT, PIL.__version__, size, keep_pixels)
    return build_once(f"images-{digest(source, repr(settings).encode())}", write)


def read(folder: Path) -> tuple[Pixels, NDArray[np.float32]]:
    """The squares, memory-mapped, and their widths over heights."""
    return np.load(folder / "pixels.npy", mmap_mode="r"), np.load(folder / "aspects.npy")


def corrupt_images(folder: Path) -> list[tuple[int, str]]:
    """The images that could not be decoded: their numbers, and why."""
    return [(i, problem) for i, problem in json.loads((folder / "corrupt.json").read_text())]


def digest(source: Source, settings: bytes) -> str:
    """What the cache of a source depends on: of files path, size and time; of a table the lengths and some content.

    A table of images may be too large to be read at each start, so of its bytes only `SAMPLED` images count.
    """
    state = hashlib.sha256(settings)
    state.update(source.rows.tobytes())
    if source.table is None:
        for path in source.paths:
            stat = path.stat()
            state.update(repr((str(path.resolve()), stat.st_size, stat.st_mtime_ns)).encode())
        return state.hexdigest()[:32]
    column = source.table[source.column]
    for chunk in column.chunks:
        content = chunk.field("bytes") if pa.types.is_struct(chunk.type) else chunk
        state.update(np.asarray(pa.compute.binary_length(content).fill_null(-1)).tobytes())
    for i in np.unique(np.linspace(0, len(source) - 1, SAMPLED).astype(int)):
        stored = source.stored(int(i))
        state.update(stored if isinstance(stored, bytes) else str(stored).encode())
    return state.hexdigest()[:32]
