"""Writes files with their digests, and compares files with a manifest: {file: {"bytes": ..., "xxh3_128": ...}}.

XXH3-128 is about as fast as memory. It detects damage and no forgery: whoever can change a file can change the
manifest as well. Older checkpoints have SHA-256. Without `xxhash`, as on a machine that has torch and transformers
only, new checkpoints have SHA-256, which is slower.

A file of more than 16 MiB has the digest of the digests of its parts of 16 MiB, so several threads can verify it.
"""

import hashlib
import importlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ALGORITHMS: dict[str, Any] = {"sha256": hashlib.sha256}
if find_spec("xxhash"):
    ALGORITHMS["xxh3_128"] = importlib.import_module("xxhash").xxh3_128
ALGORITHM = [*ALGORITHMS][-1]  # of new checkpoints
CHUNK = 1 << 20  # bytes that are read at once: they are still in the cache when they are hashed
PART = 1 << 24  # bytes; manifests depend on it
OF_PARTS = "_of_16_mib_parts"
THREADS = min(8, 4 * len(os.sched_getaffinity(0)))
"""How many parts are verified at once. Reads, xxhash and hashlib do not hold the GIL."""

Line = dict[str, Any]
"""A line of a manifest: the size of a file in bytes, and its digest."""


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Line:
    """Write a new file and have it on disk; return its line of the manifest.

    Raises:
        OSError: the file exists or cannot be written.
    """
    size, digests, current = 0, [], ALGORITHMS[ALGORITHM]()
    with path.open("xb", buffering=CHUNK) as file:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                now, left = left[: PART - size % PART], left[PART - size % PART :]
                file.write(now)
                current.update(now)
                size += len(now)
                if size % PART == 0:
                    digests.append(current.digest())
                    current = ALGORITHMS[ALGORITHM]()
        file.flush()
        os.fsync(file.fileno())
    return line(size, digests if size and size % PART == 0 else [*digests, current.digest()])


def parts_of(size: int) -> list[range]:
    """The parts of a file of `size` bytes, as ranges of its bytes; an empty file has one."""
    return [range(start, min(start + PART, size)) for start in range(0, max(size, 1), PART)]


def line(size: int, digests: list[bytes]) -> Line:
    """The line of the manifest for a file of `size` bytes, from the digests of its parts in order."""
    assert len(digests) == len(parts_of(size))
    if len(digests) == 1:
        return {"bytes": size, ALGORITHM: digests[0].hex()}
    return {"bytes": size, ALGORITHM + OF_PARTS: joined(ALGORITHM, digests)}


def lines_of(files: Mapping[str, Path]) -> dict[str, Line]:
    """The lines of the manifest for files, by name."""
    sizes = {name: file.stat().st_size for name, file in files.items()}
    with ThreadPoolExecutor(THREADS) as pool:
        parts = {
            name: [pool.submit(digest, files[name], ALGORITHM, part) for part in parts_of(size)]
            for name, size in sizes.items()
        }
        return {name: line(sizes[name], [part.result() for part in of_file]) for name, of_file in parts.items()}


def digest(file: Path, algorithm: str, part: range | None = None) -> bytes:
    """The digest of a part of a file, or of the whole file."""
    found, buffer = ALGORITHMS[algorithm](), memoryview(bytearray(CHUNK))
    with file.open("rb", buffering=0) as stream:  # not mapped: a bad block of the disk would end the process by SIGBUS
        stream.seek(part.start if part else 0)
        left = len(part) if part is not None else file.stat().st_size
        while left > 0 and (size := stream.readinto(buffer[:left])):
            found.update(buffer[:size])
            left -= size
    return found.digest()


def problem_with(folder: Path, manifest: Mapping[str, Line]) -> str | None:
    """Why the files in `folder` are not those of a manifest, or None.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line has no digest of a known algorithm.
        KeyError, TypeError, AttributeError: a line is no line of a manifest.
    """
    pool = ThreadPoolExecutor(THREADS)
    try:
        begun: list[tuple[str, str, str, list[Future[bytes]]]] = []
        for name, entry in manifest.items():
            expected = {kind: value for kind, value in entry.items() if kind != "bytes"}
            if not expected or {kind.removesuffix(OF_PARTS) for kind in expected} - ALGORITHMS.keys():
                raise ValueError(
                    f"no known digest among {', '.join(expected) or 'nothing'}: pip install xxhash; or it is of a "
                    "newer version"
                )
            if not (file := folder / name).is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != entry["bytes"]:
                return f"{name} is damaged"
            for kind, value in expected.items():
                algorithm = kind.removesuffix(OF_PARTS)
                parts = [range(size)] if kind == algorithm else parts_of(size)
                begun.append((name, kind, value, [pool.submit(digest, file, algorithm, part) for part in parts]))
        for name, kind, value, parts_begun in begun:
            found = [part.result() for part in parts_begun]
            if (joined(kind.removesuffix(OF_PARTS), found) if kind.endswith(OF_PARTS) else found[0].hex()) != value:
                return f"{name} is damaged"
        return None
    finally:
        pool.shutdown(cancel_futures=True)


def joined(algorithm: str, digests: list[bytes]) -> str:
    """The digest of the digests of parts, hexadecimal."""
    return ALGORITHMS[algorithm](b"".join(digests)).hexdigest()
