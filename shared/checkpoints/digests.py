"""Writes files with their digests, and compares a folder with its manifest: {file: {"bytes": ..., "xxh3_128": ...}}.

XXH3-128 is about as fast as memory. It detects damage and no forgery: whoever can change a file can change the
manifest as well.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

MANIFEST = "manifest.json"
ALGORITHM = "xxh3_128"  # its name in files; `new` begins a digest
new: Any = xxhash.xxh3_128
CHUNK = 1 << 20  # bytes that are written at once: they are still in the cache when they are hashed
THREADS = 4  # files that are read at once. Reads, xxhash and hashlib do not hold the GIL

Line = dict[str, Any]
"""A line of a manifest: the size of a file in bytes, and its digest."""


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Line:
    """Write a new file and have it on disk; return its line of the manifest.

    Raises:
        OSError: the file exists or cannot be written.
    """
    size, found = 0, new()
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
        found = dict(zip(files, pool.map(digest, files.values()), strict=True))
    return {name: {"bytes": file.stat().st_size, ALGORITHM: found[name]} for name, file in files.items()}


def digest(file: Path) -> str:
    """The digest of a file, hexadecimal."""
    with file.open("rb") as stream:  # not mapped: a bad block of the disk would end the process by SIGBUS
        return hashlib.file_digest(stream, new).hexdigest()


def problem_with(folder: Path) -> str | None:
    """Why a folder cannot be read, or None: every file of its manifest must have its size and digest."""
    if not folder.is_dir():
        return "there is no such folder"

    def problem(name: str, line: Line) -> str | None:
        file, size, expected = folder / name, line["bytes"], line[ALGORITHM]
        if not file.is_file():
            return f"{name} is missing"
        return None if file.stat().st_size == size and digest(file) == expected else f"{name} is damaged"

    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        with ThreadPoolExecutor(THREADS) as pool:
            return next(filter(None, pool.map(problem, manifest.keys(), manifest.values())), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read ({error})"
