"""The folders of checkpoints: written under a temporary name, committed by renaming, removed when newer ones exist."""

import errno
import json
import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.checkpoints import digests
from shared.checkpoints.states import Tensors, pieces_of
from shared.disk import sync

COMPLETE, PARTIAL = re.compile(r"step_(\d{8,})"), re.compile(r"step_\d{8,}\.partial-[0-9a-f]{8}")
WRITERS = 2  # files that are written at the same time: model and optimizer


@dataclass
class Job:
    """A checkpoint to write."""

    final: Path
    tensors: dict[str, Tensors]  # by file
    contents: dict[str, bytes]  # of the other files
    keep: int | None = None  # how many of the newest checkpoints are kept when this one is complete; None: all
    best: int | None = None  # the step of another one to keep
    needed_from: int | None = None  # also keep this step and later ones: another machine may lack the newest


def folder(output_dir: str | Path) -> Path:
    """The folder of a run's checkpoints."""
    return Path(output_dir) / "checkpoints"


def path_of(output_dir: str | Path, step: int) -> Path:
    """The checkpoint of a step."""
    return folder(output_dir) / f"step_{step:08d}"


def partial_of(final: Path) -> Path:
    """A new name beside `final`, for a folder that is not yet, or no longer, a checkpoint."""
    return final.with_name(f"{final.name}.partial-{os.urandom(4).hex()}")


def write(job: Job) -> None:
    """Write a checkpoint, commit it, and remove the old checkpoints.

    Raises:
        OSError: it could not be written, and its files are removed.
    """
    partial = partial_of(job.final)
    files = {name: pieces_of(tensors) for name, tensors in job.tensors.items()}
    files |= {name: iter([content]) for name, content in job.contents.items()}
    try:
        begin(partial, sum(tensor.nbytes for tensors in job.tensors.values() for tensor in tensors.values()))
        with ThreadPoolExecutor(WRITERS) as pool:
            lines = [*pool.map(lambda name: digests.write_file(partial / name, files[name]), files)]
        commit(partial, job.final, dict(zip(files, lines, strict=True)))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    rotate(job.final, job.keep, job.best, job.needed_from)


def begin(partial: Path, size: int) -> None:
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


def commit(partial: Path, final: Path, manifest: dict[str, dict[str, Any]]) -> None:
    """Turn a folder whose files are on disk into a checkpoint: write the manifest, then rename the folder."""
    digests.write_file(partial / digests.MANIFEST, [json.dumps(manifest, indent=1, sort_keys=True).encode()])
    for folder in {(partial / name).parent for name in manifest} | {partial}:
        sync(folder)
    replaced = None
    if os.path.lexists(final):  # a damaged one that was skipped, or a later one of a run resumed from an earlier step
        replaced = final.rename(partial_of(final))
    partial.rename(final)
    sync(final.parent)
    if replaced and replaced.is_dir() and not replaced.is_symlink():
        remove(replaced)
    elif replaced:  # a file or a link was not written by a run
        complain(f"{final} was not a checkpoint and was renamed to {replaced.name}")


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


def complain(what: str) -> None:
    """Print a problem that does not end the run, on stderr."""
    print(what, file=sys.stderr, flush=True)


def complete_in(folder: Path) -> dict[int, Path]:
    """The complete checkpoints in a folder, by step; links are not followed, unreadable ones are left out."""
    found = ours(folder, COMPLETE)
    return {int(match[1]): path for path, match in found if any(path.glob(digests.MANIFEST))}


def ours(folder: Path, names: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    """The folders in `folder` whose names match `names`, without links."""
    try:
        entries = [Path(entry.path) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [(path, match) for path in entries if (match := names.fullmatch(path.name))]
