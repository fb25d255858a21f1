"""Writes files with their digests, and compares files with a manifest: {file: {"bytes": ..., "xxh3_128": ...}}.

XXH3-128 is about as fast as memory. It detects damage and no forgery: whoever can change a file can change the
manifest as well. Manifests of older versions have SHA-256, or for files of more than 16 MiB the digest of the digests
of their parts of 16 MiB.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

ALGORITHM = "xxh3_128"  # of new checkpoints
ALGORITHMS: dict[str, Any] = {ALGORITHM: xxhash.xxh3_128, "sha256": hashlib.sha256}
OF_PARTS, PART = "xxh3_128_of_16_mib_parts", 1 << 24
CHUNK = 1 << 20  # bytes that are written at once: they are still in the cache when they are hashed
THREADS = 4  # files that are read at once. Reads, xxhash and hashlib do not hold the GIL

Line = dict[str, Any]
"""A line of a manifest: the size of a file in bytes, and its digest."""


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Line:
    """Write a new file and have it on disk; return its line of the manifest.

    Raises:
        OSError: the file exists or cannot be written.
    """
    size, found = 0, ALGORITHMS[ALGORITHM]()
    with path.open("xb", buffering=CHUNK) as file:
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                chunk = piece[start : start + CHUNK]
                file.write(chunk)
                found.update(chunk)
                size += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": size, ALGORITHM: found.hexdigest()}


def lines_of(files: Mapping[str, Path]) -> dict[str, Line]:
    """The lines of the manifest for files, by name."""
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(files, pool.map(lambda file: digest(file, ALGORITHM), files.values()), strict=True))
    return {name: {"bytes": file.stat().st_size, ALGORITHM: found[name]} for name, file in files.items()}


def digest(file: Path, algorithm: str) -> str:
    """The digest of a file, hexadecimal, by one of ALGORITHMS or OF_PARTS."""
    with file.open("rb") as stream:  # not mapped: a bad block of the disk would end the process by SIGBUS
        if algorithm != OF_PARTS:
            return hashlib.file_digest(stream, ALGORITHMS[algorithm]).hexdigest()
        parts = iter(lambda: stream.read(PART), b"")
        return xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, parts)))


def problem_with(folder: Path, manifest: Mapping[str, Line]) -> str | None:
    """Why the files in `folder` are not those of a manifest, or None.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line has no digest of a known algorithm.
        KeyError, TypeError, AttributeError: a line is no line of a manifest.
    """

    def problem(name: str) -> str | None:
        file, line = folder / name, manifest[name]
        kinds = line.keys() - {"bytes"}
        if not kinds or kinds - {*ALGORITHMS, OF_PARTS}:
            raise ValueError(f"no known digest among {', '.join(kinds) or 'nothing'}; it may be of a newer version")
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != line["bytes"] or any(digest(file, kind) != line[kind] for kind in kinds):
            return f"{name} is damaged"
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        return next(filter(None, pool.map(problem, manifest)), None)
