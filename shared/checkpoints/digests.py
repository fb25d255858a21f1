"""Digests of the files of a checkpoint. Each line of a manifest names its algorithm: {"bytes": ..., "xxh3_128": ...}.

XXH3-128 is about as fast as memory. It detects damage and no forgery: whoever can change a file can change the
manifest as well. Older checkpoints have SHA-256.

The process that writes checkpoints imports this module without site packages, so it needs nothing but `xxhash`. Without
`xxhash`, as on a machine that has torch and transformers only, new checkpoints have SHA-256, which is slower.
"""

import hashlib
import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ALGORITHMS: dict[str, Any] = {"sha256": hashlib.sha256}
PACKAGES: list[str] = []  # the folder of `xxhash`, for the process without site packages
if find_spec("xxhash"):
    xxhash: Any = importlib.import_module("xxhash")
    ALGORITHMS["xxh3_128"] = xxhash.xxh3_128
    PACKAGES.append(str(Path(xxhash.__file__).parents[1]))
ALGORITHM = [*ALGORITHMS][-1]  # of new checkpoints
CHUNK = 1 << 20  # bytes that are read or written at once: they are still in the cache when they are hashed
THREADS = min(8, len(os.sched_getaffinity(0)))
"""How many files are written or verified at once. xxhash, hashlib, zlib, reads and writes do not hold the GIL."""


def threads() -> ThreadPoolExecutor:
    """Threads for the files of one checkpoint."""
    return ThreadPoolExecutor(THREADS, "files")


def line_of(file: Path) -> dict[str, Any]:
    """The line of the manifest for a file: its size in bytes, and its digest."""
    return {"bytes": file.stat().st_size, ALGORITHM: digest(file, ALGORITHM)}


def digest(file: Path, algorithm: str) -> str:
    """The digest of a file, hexadecimal."""
    found, buffer = ALGORITHMS[algorithm](), memoryview(bytearray(CHUNK))
    with file.open("rb", buffering=0) as stream:  # not mapped: a bad block of the disk would end the process by SIGBUS
        while size := stream.readinto(buffer):
            found.update(buffer[:size])
    return found.hexdigest()


def problem_with(folder: Path, name: str, line: dict[str, Any]) -> str | None:
    """Why file `name` of `folder` is not the one that its line of the manifest describes, or None.

    Raises:
        OSError: the file cannot be read.
        ValueError: the line has no digest of a known algorithm.
        KeyError, TypeError, AttributeError: it is no line of a manifest.
    """
    expected = {kind: value for kind, value in line.items() if kind != "bytes"}
    if not expected or expected.keys() - ALGORITHMS.keys():
        raise ValueError(
            f"no known digest among {', '.join(expected) or 'nothing'}: pip install xxhash; or it is of a newer version"
        )
    if not (file := folder / name).is_file():
        return f"{name} is missing"
    same = file.stat().st_size == line["bytes"] and all(digest(file, kind) == it for kind, it in expected.items())
    return None if same else f"{name} is damaged"
