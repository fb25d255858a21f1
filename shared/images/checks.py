"""What is known of stored images before a run decodes any: fingerprints, and which are corrupt by their headers.

Each is opened once per machine. Later starts find what was seen, by the times of the files or the bytes of a table.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from tqdm import tqdm

from shared.datasets.prepared import build_once
from shared.images.decoding import CorruptImage, inspect

FORMAT = 1  # raise it when other things are found in the same images: it is part of the cache's names
DEEP = ("I", "F")  # Pillow's modes of more than 8 bits, such as I;16
HASHED = 1 << 30  # bytes of a table's images that are read at each start; of more, evenly spaced blocks
PIECE = 1 << 16


@dataclass(frozen=True)
class Checked:
    """What was found in the stored images of a source."""

    key: str  # of what is stored, on this machine
    prints: NDArray[np.uint64]  # [M] of each image: see `decoding.inspect`
    problems: Mapping[int, str]  # what is wrong with corrupt ones
    deep: tuple[int, ...]  # those of more than 8 bits


def check(key: str, count: int, stored: Callable[[int], bytes | Path], name: str) -> Checked:
    """Look into the headers of `count` images, as far as that has not been done on this machine for what `key` means.

    Args:
        key: see `key_of_files` and `key_of_column`.
        stored: gives image number i.
        name: of the source, for the progress bar.

    Raises:
        UserError: a file cannot be read.
    """

    def write(folder: Path) -> None:
        def one(i: int) -> tuple[int, str, str]:
            try:
                return *inspect(stored(i)), ""
            except CorruptImage as problem:
                return problem.args[1], "", problem.args[0]

        with ThreadPoolExecutor(2 * len(os.sched_getaffinity(0))) as threads:  # they wait for the disk, too
            looks = threads.map(one, range(count))
            found = list(tqdm(looks, f"checking {name}", count, unit=" images", mininterval=0.5, delay=2))
        np.save(folder / "prints.npy", np.array([fingerprint for fingerprint, *_ in found], np.uint64))
        problems = {i: problem for i, (*_, problem) in enumerate(found) if problem}
        deep = [i for i, (_, mode, _) in enumerate(found) if mode.startswith(DEEP)]
        (folder / "found.json").write_text(json.dumps({"problems": problems, "deep": deep}))

    settings = hashlib.blake2b(f"{FORMAT} {PIL.__version__} {key}".encode(), digest_size=16)
    folder = build_once(f"checked-{settings.hexdigest()}", write)
    found = json.loads((folder / "found.json").read_text())
    problems = {int(i): problem for i, problem in found["problems"].items()}
    return Checked(key, np.load(folder / "prints.npy"), problems, tuple(found["deep"]))


def key_of_files(paths: Sequence[Path]) -> str:
    """What changes when one of the files does: their paths, sizes and times on this machine.

    A time of change cannot be set back, as copying and unpacking do with the time of modification.
    """
    state = hashlib.blake2b(digest_size=16)
    for path in paths:
        stat = path.stat()
        entry = str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        state.update(repr(entry).encode())
    return state.hexdigest()


def key_of_column(column: pa.ChunkedArray) -> str:
    """What changes when an image of a column of bytes does: their lengths and bytes, of more than 1 GiB a sample."""
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
