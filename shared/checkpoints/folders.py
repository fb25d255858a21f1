"""The folders of checkpoints: written under a temporary name, committed by renaming, removed when newer ones exist."""

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.checkpoints import digests
from shared.checkpoints.states import Tensors, pieces_of
from shared.disk import NO_SPACE, sync, usual_permissions

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
    more_bytes: int = 0  # of other files, which other code writes
    needed_from: int | None = None  # also keep this step and later ones: another machine may lack the newest
    partial: Path = field(init=False)

    def __post_init__(self) -> None:
        self.partial = partial_of(self.final)

    def bytes(self) -> int:
        """Its size on disk, except the names of the tensors."""
        tensors = (tensor for of_file in self.tensors.values() for tensor in of_file.values())
        return sum(tensor.nbytes for tensor in tensors) + sum(map(len, self.contents.values())) + self.more_bytes


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

    def fill() -> None:
        require_space(job.final.parent, job.bytes())
        files = {name: pieces_of(tensors) for name, tensors in job.tensors.items()}
        files |= {name: iter([content]) for name, content in job.contents.items()}
        with ThreadPoolExecutor(WRITERS) as pool:
            lines = pool.map(lambda name: digests.write_file(job.partial / name, files[name]), files)
            commit(job.partial, job.final, dict(zip(files, lines, strict=True)))

    attempt(job.partial, fill)
    rotate(job.final, job.keep, job.best, job.needed_from)


def attempt(partial: Path, fill: Callable[[], object]) -> None:
    """Create the folder `partial` and fill it; remove it if that fails."""
    try:
        if not partial.parent.exists():
            partial.parent.mkdir()  # without parents: after a lost mount they would be created on another disk
            sync(partial.parent.parent)
        partial.mkdir()
        fill()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def require_space(folder: Path, needed: int) -> None:
    """Raise OSError when the disk of `folder` has less than `needed` bytes left."""
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, "not enough space")


def described(error: OSError, job: Job) -> str:
    """An error with, if the disk is full, the space that a checkpoint needs and the space left."""
    if error.errno not in NO_SPACE:
        return str(error)
    free = shutil.disk_usage(job.final.parent.parent).free
    return f"{error}; {job.bytes() / 1e6:,.1f} MB are needed, and in {job.final.parent} {free / 1e6:,.1f} MB are free"


def commit(partial: Path, final: Path, manifest: dict[str, dict[str, Any]]) -> None:
    """Turn a folder whose files are on disk into a checkpoint: write the manifest, then rename the folder."""
    digests.write_file(partial / "manifest.json", [json.dumps(manifest, indent=1, sort_keys=True).encode()])
    usual_permissions(partial)
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
    match = COMPLETE.fullmatch(newest.name)
    assert match
    found = complete_in(newest.parent)
    older = sorted(step for step in found if step <= int(match[1]))
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
    """The complete checkpoints in a folder, by step; links are not followed."""
    return {int(match[1]): path for path, match in ours(folder, COMPLETE) if has_manifest(path)}


def partials_in(folder: Path) -> list[Path]:
    """The incomplete checkpoints in a folder, recognized by their names."""
    return [path for path, _ in ours(folder, PARTIAL)]


def ours(folder: Path, names: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    """The folders in `folder` whose names match `names`, in order."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return []
    matches = [(entry, names.fullmatch(entry.name)) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [(Path(entry.path), match) for entry, match in matches if match]


def has_manifest(folder: Path) -> bool:
    """Whether a folder has a readable manifest."""
    try:
        return (folder / "manifest.json").is_file()
    except OSError:
        return False
