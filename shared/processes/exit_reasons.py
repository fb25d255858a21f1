"""What the processes of a launch tell each other of why they end.

Those of one machine have a file together. A launcher ends all processes as soon as one of them has, and whoever is
ended by that has nothing to say. All machines have the store in which they met, as long as that process lives.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch import distributed as dist

REASONS = ("failed", "refused", "preempted")
WORD = "accelerate-recipes/ended"  # the key in the store: what the first process to end has said, as JSON
PATIENCE = 2.0  # seconds in which a process that has gone away is found out, once its connection has closed
LOST = re.compile(r"gloo/|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|NCCL|TCPStore|Socket")


@dataclass
class Launch:
    """What this process knows of the others. There is one of these in a process: `known`."""

    store: Any = None
    """The store in which the processes of all machines have met, if they have."""
    processes: Sequence[Mapping[str, Any]] = ()
    """Of each rank: host, machine, pid."""
    file: int | None = None
    path: Path | None = None


known = Launch()
temporary: list[Path] = []  # folders that this process has made for itself, and that go with it


@dataclass(frozen=True)
class Peer:
    """How another process has ended."""

    code: int
    """The exit code of this process, for that reason."""
    line: str
    """What to say of it; empty if there is nothing to say."""


def local_rank() -> int:
    """This process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_processes() -> int:
    """How many processes of this launch run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))


def me() -> dict[str, Any]:
    """What tells this process from all others: its machine is what numbers processes, which a container does, too."""
    boot, numbers = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    machine = ""
    with contextlib.suppress(OSError):
        machine = f"{boot.read_text().strip()} {numbers.readlink()}"
    return {"host": socket.gethostname(), "machine": machine, "pid": os.getpid()}


def join() -> int:
    """The file that the processes of this machine have together, open. Each has a time in it for each reason to end.

    It has a name only until all have met (`forget`), and ends with the last process that has it open.
    """
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    launch = "-".join(re.sub(r"\W", "_", os.environ.get(name, "")) for name in names)
    path = Path(tempfile.gettempdir()) / f"accelerate-recipes-{os.getuid()}-{launch}"
    if known.file is None or known.path != path:
        known.file, known.path = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), path
    return known.file


def forget() -> None:
    """Take the name from the file, which stays for the processes that have it open: all, once they have met."""
    if known.file is not None and known.path is not None:
        with contextlib.suppress(OSError):
            if os.path.samestat(known.path.stat(), os.fstat(known.file)):
                known.path.unlink()


def clean_up() -> None:
    """Remove what this process has put into the folder of temporary files; called as it ends, however it ends."""
    forget()
    while temporary:
        shutil.rmtree(temporary.pop(), ignore_errors=True)


def say(what: str) -> None:
    """Tell the other processes on this machine why this one ends."""
    with contextlib.suppress(OSError):
        if local_processes() > 1:
            os.pwrite(join(), struct.pack("<d", time.time()), place_of(local_rank(), what))


def place_of(rank: int, what: str) -> int:
    """Where in the file it stands when local process `rank` has ended for this reason."""
    return 8 * (len(REASONS) * rank + REASONS.index(what))


def said(rank: int, what: str) -> bool:
    """Whether local process `rank` of this launch ends for this reason."""
    with contextlib.suppress(OSError):
        word = os.pread(join(), 8, place_of(rank, what))
        return len(word) == 8 and struct.unpack("<d", word)[0] > psutil.Process().create_time()  # an earlier launch's
    return False


def ended(rank: int) -> bool:
    """Whether local process `rank` has failed, or refused to go on."""
    return said(rank, "failed") or said(rank, "refused")


def peer_said(what: str) -> bool:
    """Whether another process on this machine ends for this reason."""
    return any(said(rank, what) for rank in range(local_processes()) if rank != local_rank())


def peer_failed() -> bool:
    """Whether another process on this machine has, so that a signal is the launcher's, which ends the rest."""
    return peer_said("failed") or peer_said("refused")


def tell_all_machines(code: int, why: str) -> None:
    """Leave in the store why this process ends, for those on other machines; the first one's word stays."""
    if known.store is not None:
        word = json.dumps(me() | {"rank": int(os.environ.get("RANK", 0)), "code": code, "why": why})
        with contextlib.suppress(RuntimeError):  # whoever had the store has ended
            known.store.compare_set(WORD, "", word)


def of_peer(error: Exception) -> Peer | None:
    """Why another process has ended, if that is why a call to torch raised `error` here; None if it is not."""
    lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and LOST.search(str(error)))
    deadline = time.monotonic() + (PATIENCE if lost else 0)
    while True:
        if peer := found():
            return peer
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    if not lost:
        return None
    return Peer(1, f"the connection to another process is lost ({str(error).splitlines()[0][:200]}): see what it says")


def found() -> Peer | None:
    """The process that has ended, as far as can be seen from here: by its word, or because it is gone."""
    if known.store is not None:
        with contextlib.suppress(RuntimeError):
            if known.store.check([WORD]):
                word = json.loads(known.store.get(WORD))
                if word["pid"] != os.getpid() or word["host"] != socket.gethostname():
                    return Peer(word["code"], f"rank {word['rank']} on {word['host']} has ended: {word['why']}")
    others = [rank for rank in range(local_processes()) if rank != local_rank()]
    for what, code in (("refused", 2), ("failed", 1)):
        for rank in others:
            if said(rank, what):
                first = int(os.environ.get("RANK", 0)) - local_rank()  # launchers number a machine's in a row
                return Peer(code, f"rank {first + rank} on {socket.gethostname()} has ended: its output says why")
    if peer_said("preempted"):  # with nothing to save, and so at once
        return Peer(143, "")
    mine = me()
    for rank, other in enumerate(known.processes):
        if other["machine"] == mine["machine"] and other["pid"] != mine["pid"] and not lives(other["pid"]):
            return Peer(
                1,
                f"rank {rank} (process {other['pid']} on {other['host']}) has ended without a word: it was killed, for "
                "example for memory (see the kernel's log), or its output says why",
            )
    return None


def lives(pid: int) -> bool:
    """Whether a process of this machine is there and has not ended."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
