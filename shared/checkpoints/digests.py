"""Digests of the files of a checkpoint. Each line of a manifest names its algorithm: {"bytes": ..., "xxh3_128": ...}.

XXH3-128 is about as fast as memory. It detects damage and no forgery: whoever can change a file can change the
manifest as well. Older checkpoints have SHA-256.

A file of more than 16 MiB has the digest of the digests of its parts of 16 MiB. So several threads or processes can
write or verify parts of one file, and the digest does not depend on their number.

The process that writes checkpoints imports this module without site packages, so it needs nothing but `xxhash` and
`isal`. Without `xxhash`, as on a machine that has torch and transformers only, new checkpoints have SHA-256, which is
slower. Without `isal` the CRC-32 checksums of zip archives come from zlib: the same bytes, at a tenth of the speed.
"""

import hashlib
import importlib
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ALGORITHMS: dict[str, Any] = {"sha256": hashlib.sha256}
PACKAGES: list[str] = []  # the folders of `xxhash` and `isal`, for the process without site packages
if find_spec("xxhash"):
    xxhash: Any = importlib.import_module("xxhash")
    ALGORITHMS["xxh3_128"] = xxhash.xxh3_128
    PACKAGES.append(str(Path(xxhash.__file__).parents[1]))
crc32: Any = zlib.crc32
if find_spec("isal"):
    isal: Any = importlib.import_module("isal.isal_zlib")
    crc32 = isal.crc32
    PACKAGES.append(str(Path(isal.__file__).parents[1]))
ALGORITHM = [*ALGORITHMS][-1]  # of new checkpoints
CHUNK = 1 << 20  # bytes that are read or written at once: they are still in the cache when they are hashed
PART = 1 << 24  # bytes; manifests depend on it
OF_PARTS = "_of_16_mib_parts"
THREADS = min(8, 4 * len(os.sched_getaffinity(0)))
"""How many parts are written or verified at once. xxhash, hashlib, zlib, isal, reads and writes do not hold the GIL."""

Line = dict[str, Any]
"""A line of a manifest: the size of a file in bytes, and its digest."""


def threads(processes: int = 1) -> ThreadPoolExecutor:
    """Threads for the parts of the files of one checkpoint, in each of the processes that share this work."""
    return ThreadPoolExecutor(min(THREADS, max(1, 2 * THREADS // processes)), "files")


def parts_of(size: int) -> list[range]:
    """The parts of a file of `size` bytes, as ranges of its bytes; an empty file has one."""
    return [range(start, min(start + PART, size)) for start in range(0, max(size, 1), PART)]


def overlaps(part: int, extent: tuple[int, int]) -> bool:
    """Whether the part of this index has any of the bytes from `extent[0]` to before `extent[1]`."""
    return part * PART < extent[1] and extent[0] < (part + 1) * PART


def line(size: int, digests: list[bytes]) -> Line:
    """The line of the manifest for a file of `size` bytes, from the digests of its parts in order."""
    assert len(digests) == len(parts_of(size))
    if len(digests) == 1:
        return {"bytes": size, ALGORITHM: digests[0].hex()}
    return {"bytes": size, ALGORITHM + OF_PARTS: joined(ALGORITHM, digests)}


def lines_of(files: Mapping[str, Path]) -> dict[str, Line]:
    """The lines of the manifest for files, by name."""
    sizes = {name: file.stat().st_size for name, file in files.items()}
    with threads() as pool:
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
    pool = threads()
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
