"""Writes a checkpoint so that it is complete or absent, in the training process or in a second process.

That process is this file run as a script. It imports only `xxhash`, `isal` and what Python brings, so that it starts
within 50 ms. It has a low priority, ignores the signals that are meant for the training process, and ends with it. If
several training processes of a machine share a checkpoint, each has such a process, and that of the leader commits it.
"""

import ctypes
import json
import os
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.checkpoints import digests
from shared.checkpoints.files import Channel, Image, Pipe, create_files, write_file, write_files, write_share
from shared.disk import sync, usual_permissions

NICENESS = 10
# The process that writes. It is started without the module `site`, whose imports may take a second.
SERVE = (
    f"import sys; sys.path[:] = [{str(Path(__file__).parents[2])!r}, *sys.path, *{digests.PACKAGES!r}]; "
    "from shared.checkpoints.writer import serve; serve(int(sys.argv[1]))"
)
NOT_FOR_THE_WRITER = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
COMPLETE, PARTIAL = re.compile(r"step_(\d{8,})"), re.compile(r"step_\d{8,}\.partial-[0-9a-f]{8}")


@dataclass
class Job:
    """A checkpoint to write."""

    final: Path
    images: dict[str, Image]
    contents: dict[str, bytes]
    keep: int | None = None  # how many of the newest checkpoints are kept when this one is complete; None: all
    best: int | None = None  # the step of another one to keep
    needed_from: int | None = None  # also keep this step and later ones: another machine may lack the newest
    partial: Path = field(init=False)

    def __post_init__(self) -> None:
        self.partial = partial_of(self.final)

    def bytes(self) -> int:
        """Its size on disk."""
        return sum(image.size for image in self.images.values()) + sum(map(len, self.contents.values()))


def partial_of(final: Path) -> Path:
    """A new name beside `final`, for a folder that is not yet, or no longer, a checkpoint."""
    return final.with_name(f"{final.name}.partial-{os.urandom(4).hex()}")


def write(job: Job, others: Sequence[Channel] = ()) -> None:
    """Write a checkpoint from memory, commit it, and remove the old checkpoints.

    Args:
        job: the checkpoint.
        others: channels to the processes that write the parts of its files that `job` lacks.

    Raises:
        OSError: it could not be written, and its files are removed; gives the space that is needed and free.
    """
    waiting = list(others)

    def tell(folder: str) -> None:
        while waiting:
            waiting.pop().send(folder)

    def fill() -> None:
        require_space(job.final.parent, job.bytes())
        create_files(job.partial, job.images)
        tell(str(job.partial))
        commit(job.partial, job.final, write_files(job.partial, job.images, job.contents, others))

    try:
        attempt(job.partial, fill)
    except OSError as error:
        raise OSError(f"{error}; {space(job.final.parent, job.bytes())}") from None
    finally:
        tell("")  # there is nothing to write
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
        raise OSError("not enough space")


def space(folder: Path, needed: int) -> str:
    """A text with `needed` bytes and the free bytes of the disk of `folder`."""
    try:
        free = f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free"
    except OSError as error:
        free = f"the free space is unknown ({error.strerror})"
    return f"{needed / 1e6:,.1f} MB are needed, and in {folder} {free}"


def commit(partial: Path, final: Path, manifest: dict[str, dict[str, Any]]) -> None:
    """Turn a folder whose files are on disk into a checkpoint: write the manifest, then rename the folder."""
    write_file(partial / "manifest.json", json.dumps(manifest, indent=1, sort_keys=True).encode())
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


class Writer:
    """The second process, as the training process controls it: one job at a time, all with the same images.

    Args:
        images: the files in memory.
        others: of the leader, the pipes to the writers that write the other parts.
        leader: of another process, the pipe to the leader's writer.
        processes: how many processes write the files together.
    """

    def __init__(
        self, images: dict[str, Image], others: Sequence[Pipe] = (), leader: Pipe | None = None, processes: int = 1
    ) -> None:
        pipes = [descriptor for pipe in (*others, *([leader] if leader else [])) for descriptor in pipe]
        # Blocked until the process ignores them: these signals cannot end it while it starts.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_THE_WRITER)
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", SERVE, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[*(image.descriptor for image in images.values()), *pipes],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for descriptor in pipes:  # so that the pipes end with the process
                os.close(descriptor)
        shared = {name: (it.descriptor, it.size, it.records, it.share) for name, it in images.items()}
        self._send((shared, list(others), leader, processes))

    def start(self, job: Job) -> None:
        """Start a job; the memory of the images must not change before `reply` returns its outcome."""
        self._send({name: value for name, value in vars(job).items() if name != "images"})

    def _send(self, what: Any) -> None:
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it has ended: `reply` reports that
            self.process.stdin.write(pickle.dumps(what))
            self.process.stdin.flush()

    def reply(self, wait: bool) -> str | None:
        """The outcome of the job: "" for success, else the problem; None while it runs."""
        assert self.process.stdout
        if not wait and not select.select([self.process.stdout], [], [], 0)[0]:
            return None
        try:
            return pickle.load(self.process.stdout)
        except (EOFError, pickle.UnpicklingError):
            return f"the process that writes it ended with exit code {self.process.wait()}"

    def end(self) -> None:
        """End the process, which has no job."""
        assert self.process.stdin
        assert self.process.stdout
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


def serve(parent: int) -> None:
    """Write the jobs of the parent until it closes the pipe or ends."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.nice(NICENESS)
    for number in NOT_FOR_THE_WRITER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_THE_WRITER)
    jobs, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    with suppress(EOFError):
        shared, pipes, pipe, processes = pickle.load(jobs)
        images = {name: Image(*values) for name, values in shared.items()}
        others, leader = [Channel(other) for other in pipes], pipe and Channel(pipe)
        while True:
            asked = pickle.load(jobs)
            partial = asked.pop("partial")
            job = Job(**asked, images=images)
            job.partial = partial
            try:
                problem = ""
                if leader:
                    problem = write_share(images, leader, processes)
                else:
                    write(job, others)
            except OSError as error:
                problem = str(error)
            replies.write(pickle.dumps(problem))
            replies.flush()
