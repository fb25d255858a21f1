"""The folders of checkpoints: written under a temporary name, committed by renaming, removed when newer ones exist.

The manifest of a folder has a line for each file, its size and digest: {file: {"bytes": ..., "xxh3_128": ...}}.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from shared.checkpoints.states import Tensors, pieces_of
from shared.disk import sync
from shared.errors import complain

COMPLETE, PARTIAL = re.compile(r"step_(\d{8,})"), "step_[0-9]*.partial-" + 8 * "[0-9a-f]"  # a pattern of files
WRITERS = 2  # files that are written at the same time: model and optimizer
MANIFEST = "manifest.json"
ALGORITHM = "xxh3_128"  # its name in a manifest. It is about as fast as memory, and detects damage, but no forgery
new_digest: Any = xxhash.xxh3_128
CHUNK = 1 << 20  # bytes that are written at once: they are still in the cache when they are hashed
THREADS = 4  # files that are read at once. Reads, xxhash and hashlib do not hold the GIL

Line = dict[str, Any]  # of a manifest


@dataclass
class Job:
    """A checkpoint to write."""

    final: Path
    tensors: dict[str, Tensors]  # by file
    contents: dict[str, bytes]  # of the other files
    keep: int | None = None  # how many of the newest checkpoints are kept when this one is complete; None: all
    best: int | None = None  # the step of another one to keep
    needed_from: int | None = None  # also keep this step and later ones: another machine may lack the newest
    copied: Future[None] | None = None  # done when the tensors have their values


def folder(output_dir: str | Path) -> Path:
    """The folder of a run's checkpoints."""
    return Path(output_dir) / "checkpoints"


def path_of(output_dir: str | Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder(output_dir) / f"step_{step:08d}"


def partial_of(final: Path) -> Path:
    """A new name beside `final`, for a folder that is not yet, or no longer, a checkpoint."""
    return final.with_name(f"{final.name}.partial-{os.urandom(4).hex()}")


def write_checkpoint(job: Job) -> None:
    """Write a checkpoint, commit it, and remove the old checkpoints.

    Raises:
        OSError: it could not be written, and its files are removed.
    """
    if job.copied:
        job.copied.result()
    partial = partial_of(job.final)
    files = {name: pieces_of(tensors) for name, tensors in job.tensors.items()}
    files |= {name: iter([content]) for name, content in job.contents.items()}
    try:
        create(partial, sum(tensor.nbytes for tensors in job.tensors.values() for tensor in tensors.values()))
        with ThreadPoolExecutor(WRITERS) as pool:
            lines = [*pool.map(lambda name: write_file(partial / name, files[name]), files)]
        commit(partial, job.final, dict(zip(files, lines, strict=True)))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    rotate(job.final, job.keep, job.best, job.needed_from)


def create(partial: Path, size: int) -> None:
    """Create a folder for a checkpoint whose tensors take `size` bytes.

    Raises:
        OSError: there is less space, which other files of the run need as well; or the folder cannot be created.
    """
    folder = partial.parent
    if not folder.exists():
        folder.mkdir()  # without parents: after a lost mount they would be created on another disk
        sync(folder.parent)
    if (free := shutil.disk_usage(folder).free) < size:
        raise OSError(errno.ENOSPC, f"{size / 1e6:,.1f} MB are needed, and {free / 1e6:,.1f} MB are free")
    partial.mkdir()


def commit(partial: Path, final: Path, manifest: dict[str, Line]) -> None:
    """Turn a folder whose files are on disk into a checkpoint: write the manifest, then rename the folder."""
    write_file(partial / MANIFEST, [json.dumps(manifest, indent=1, sort_keys=True).encode()])
    for folder in {(partial / name).parent for name in manifest} | {partial}:
        sync(folder)
    # It may exist: a damaged one that was skipped, or a later one of a run that was resumed from an earlier step.
    replaced = final.rename(partial_of(final)) if final.is_dir() and not final.is_symlink() else None
    partial.rename(final)  # fails if a file or a link is there, which was not written by a run
    sync(final.parent)
    if replaced:
        remove(replaced)


def rotate(newest: Path, keep: int | None, best: int | None, needed_from: int | None = None) -> None:
    """Remove complete checkpoints that are older than the last `keep` up to `newest`.

    Also kept are the one of step `best`, those from step `needed_from` on, and those later than `newest`, which exist
    if the run was resumed from an earlier step.
    """
    found = complete_in(newest.parent)
    older = sorted(step for step in found if step <= int(newest.name.removeprefix("step_")))
    for step in older[: -keep if keep else 0]:
        if step != best and (needed_from is None or step < needed_from):
            try:
                remove(found[step].rename(partial_of(found[step])))  # so no partial checkpoint has its name
            except OSError as error:
                complain(f"{found[step]} cannot be removed ({error})")


def remove(folder: Path) -> None:
    """Remove a folder that a run wrote; print a line for each part that cannot be removed."""
    shutil.rmtree(folder, onerror=lambda _, path, error: complain(f"{path} cannot be removed ({error[1]})"))


def complete_in(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder, by step; links are not followed, unreadable ones are left out."""
    found = [path for path in folder.glob(f"step_*/{MANIFEST}") if not path.parent.is_symlink()]
    return {int(match[1]): path.parent for path in found if (match := COMPLETE.fullmatch(path.parent.name))}


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> Line:
    """Write a new file and have it on disk; return its line of the manifest.

    Raises:
        OSError: the file exists or cannot be written.
    """
    found = new_digest()
    with path.open("xb", buffering=CHUNK) as file:
        for piece in pieces:
            for start in range(0, len(piece), CHUNK):
                chunk = piece[start : start + CHUNK]
                file.write(chunk)
                found.update(chunk)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), ALGORITHM: found.hexdigest()}


def lines_of(files: Mapping[str, Path]) -> dict[str, Line]:
    """The lines of the manifest for files, by name."""
    with ThreadPoolExecutor(THREADS) as pool:
        found = dict(zip(files, pool.map(digest, files.values()), strict=True))
    return {name: {"bytes": file.stat().st_size, ALGORITHM: found[name]} for name, file in files.items()}


def digest(file: Path) -> str:
    """The digest of a file, hexadecimal."""
    with file.open("rb") as stream:  # not mapped: a bad block of the disk would end the process by SIGBUS
        return hashlib.file_digest(stream, new_digest).hexdigest()


def problem_with(folder: Path) -> str | None:
    """Why a folder cannot be read, or None: every file of its manifest must have its size and digest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if any(ALGORITHM not in line for line in manifest.values()):
            raise ValueError("no known digest; it may be of another version")
        found = lines_of({name: folder / name for name in manifest})
        return next((f"{name} is damaged" for name, line in manifest.items() if line | found[name] != line), None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"it cannot be read ({error})"
