"""What the processes of a launch tell each other, on one machine, of why they end: through empty files.

A launcher ends all processes as soon as one of them has; whoever is ended by that has nothing to say.
"""

import contextlib
import os
import re
import tempfile
from pathlib import Path

import psutil

FORGOTTEN = 3600.0  # seconds after which nobody reads any more what a process has said of its end


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_processes() -> int:
    """How many processes of this launch run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))


def mark_of(what: str, rank: int) -> Path:
    """The empty file by which a process tells the others on its machine why it ends: `failed` or `preempted`."""
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    launch = "-".join(re.sub(r"\W", "_", os.environ.get(name, "")) for name in names)
    return Path(tempfile.gettempdir()) / f"accelerate-recipes-{what}-{os.getuid()}-{launch}-{rank}"


def say(what: str) -> None:
    """Tell the other processes on this machine why this one ends; what other launches said long ago is removed.

    Nobody knows which process is the last one to read, and so these files outlive their launch.
    """
    with contextlib.suppress(OSError):
        if local_processes() > 1:
            mine = mark_of(what, local_rank())
            mine.touch()
            for mark in mine.parent.glob(f"accelerate-recipes-{what}-{os.getuid()}-*"):
                if mine.stat().st_mtime - mark.stat().st_mtime > FORGOTTEN:
                    mark.unlink()


def said(rank: int, what: str) -> bool:
    """Whether local process `rank` of this launch ends for this reason."""
    with contextlib.suppress(OSError):  # an older one is another launch's
        return mark_of(what, rank).stat().st_mtime > psutil.Process().create_time()
    return False


def peer_said(what: str) -> bool:
    """Whether another process on this machine ends for this reason."""
    return any(said(rank, what) for rank in range(local_processes()) if rank != local_rank())


def peer_failed() -> bool:
    """Whether another process on this machine has, so that a signal is the launcher's, which ends the rest."""
    return peer_said("failed")
