"""The end of a process: it records its reason where the others can read it, prints one line, and leaves.

A launcher ends all processes after the first one ends. The others then read the recorded exit code, and print no error
of their own. Processes of one machine share a file. Processes of all machines share the store of the rendezvous, which
exists as long as the process that opened it.
"""

import contextlib
import gc
import json
import os
import re
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import psutil
from torch import distributed as dist

from shared.errors import UserError, first_line
from shared.processes import collectives, folder_lock, signals

EXIT_USER_ERROR = 2
ENTRY = struct.Struct("<dB")  # of a process in the shared file: when it ended, and its exit code
STORE_KEY = "accelerate-recipes/ended"  # its value: the reason of the first process that ended, as JSON
SEARCH_SECONDS = 2.0  # how long to look for the process that ended, after a connection was lost
LOST = re.compile(r"gloo/|Connection (closed|reset|refused)|Broken pipe|Timed out waiting|NCCL|TCPStore|Socket")


@dataclass
class Peers:
    """What this process knows about the others. Each process has one instance: `known`."""

    store: Any = None  # of the rendezvous of all machines; None before it
    processes: Sequence[Mapping[str, Any]] = ()  # host, machine and pid of each rank, as from `identity`
    file: int | None = None
    path: Path | None = None


known = Peers()


class Peer(NamedTuple):
    """How another process has ended."""

    code: int  # the exit code of this process, for that reason
    line: str  # the message to print; empty for none


def local_rank() -> int:
    """The rank of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", 0))


def local_processes() -> int:
    """The number of processes of this launch on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))


def identity() -> dict[str, Any]:
    """Host, machine and pid of this process. `machine` is the PID namespace, since each container has its own pids."""
    boot, numbers = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    machine = ""
    with contextlib.suppress(OSError):
        machine = f"{boot.read_text().strip()} {numbers.readlink()}"
    return {"host": socket.gethostname(), "machine": machine, "pid": os.getpid()}


def open_file() -> int:
    """Return the descriptor of the file that the processes of this machine share.

    The file has an ENTRY for each process, by local rank. Its name is removed once all processes have opened it
    (`unlink_file`); the kernel frees the file when the last process ends.
    """
    names = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    launch = "-".join(re.sub(r"\W", "_", os.environ.get(name, "")) for name in names)
    path = Path(tempfile.gettempdir()) / f"accelerate-recipes-ended-{os.getuid()}-{launch}"
    if known.file is None or known.path != path:
        known.file, known.path = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), path
    return known.file


def unlink_file() -> None:
    """Remove the name of the shared file. Processes that have it open can still use it."""
    if known.file is not None and known.path is not None:
        with contextlib.suppress(OSError):
            if os.path.samestat(known.path.stat(), os.fstat(known.file)):
                known.path.unlink()


def record(code: int, why: str = "") -> None:
    """Record the exit code with which this process ends, for the other processes on this machine.

    With `why`, the processes of all machines can read it; the reason of the first process is kept.
    """
    with contextlib.suppress(OSError):
        if local_processes() > 1:
            os.pwrite(open_file(), ENTRY.pack(time.time(), code), ENTRY.size * local_rank())
    if why and known.store is not None:
        word = json.dumps(identity() | {"rank": int(os.environ.get("RANK", 0)), "code": code, "why": why})
        with contextlib.suppress(RuntimeError):  # the process that opened the store has ended
            known.store.compare_set(STORE_KEY, "", word)


def peers_that_ended(*codes: int) -> list[int]:
    """The local ranks of the other processes on this machine that have recorded one of these exit codes.

    A time before our own start is from an earlier launch.
    """
    if local_processes() == 1:
        return []
    started, found = psutil.Process().create_time(), []
    with contextlib.suppress(OSError):
        entries = os.pread(open_file(), ENTRY.size * local_processes(), 0)
        for rank, (ended, code) in enumerate(ENTRY.iter_unpack(entries)):
            if rank != local_rank() and ended > started and code in codes:
                found.append(rank)
    return found


def peer_failed() -> bool:
    """Whether another process on this machine has ended with an error; the launcher then signals the rest to end."""
    return bool(peers_that_ended(signals.EXIT_FAILED, EXIT_USER_ERROR))


def peer_behind(error: Exception) -> Peer | None:
    """Return the process whose end made a call to torch raise `error` here; None if `error` has another cause."""
    lost = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and LOST.search(str(error)))
    deadline = time.monotonic() + (SEARCH_SECONDS if lost else 0)
    while not (peer := ended_peer()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if peer or not lost:
        return peer
    return Peer(1, f"the connection to another process is lost ({first_line(error)[:200]}): see its output")


def ended_peer() -> Peer | None:
    """Return another process that has recorded a reason or no longer exists; None if this process can see none."""
    if known.store is not None:
        with contextlib.suppress(RuntimeError):
            if known.store.check([STORE_KEY]):
                word = json.loads(known.store.get(STORE_KEY))
                if word["pid"] != os.getpid() or word["host"] != socket.gethostname():
                    return Peer(word["code"], f"rank {word['rank']} on {word['host']} has ended: {word['why']}")
    for code in (EXIT_USER_ERROR, signals.EXIT_FAILED, signals.EXIT_PREEMPTED):
        if ranks := peers_that_ended(code):
            first = int(os.environ.get("RANK", 0)) - local_rank()  # ranks of one machine are consecutive
            line = f"rank {first + ranks[0]} on {socket.gethostname()} has ended: see its output"
            return Peer(code, "" if code == signals.EXIT_PREEMPTED else line)  # it said so itself
    mine = identity()
    for rank, other in enumerate(known.processes):
        if other["machine"] == mine["machine"] and other["pid"] != mine["pid"] and not is_alive(other["pid"]):
            return Peer(
                1,
                f"rank {rank} (process {other['pid']} on {other['host']}) has ended without a message: it was killed, "
                "for example for lack of memory (see the kernel's log), or its output has the reason",
            )
    return None


def is_alive(pid: int) -> bool:
    """Whether process `pid` of this machine runs: it exists and is no zombie."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def exit_with_error(error: UserError) -> NoReturn:
    """End this process with exit code 2; the process with the lowest local rank that is refused prints its error.

    Processes of one machine wait up to 10 s for each other: after the first exit, the launcher kills the others.
    """
    here, deadline = local_rank(), time.monotonic() + 10
    signals.stop_listening()

    def leave(*_: object) -> NoReturn:
        if here != 0 and not any(rank < here for rank in peers_that_ended(EXIT_USER_ERROR)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        exit_now(EXIT_USER_ERROR)

    signal.signal(signal.SIGTERM, leave)  # sent by the launcher after the first exit
    if here == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    record(EXIT_USER_ERROR, str(error))
    awaited = {*range(1, local_processes())} if here == 0 else {0}
    while not awaited.issubset(peers_that_ended(signals.EXIT_FAILED, EXIT_USER_ERROR)) and time.monotonic() < deadline:
        time.sleep(0.05)
    leave()


def exit_now(code: int) -> NoReturn:
    """End immediately, without the interpreter's shutdown."""
    folder_lock.release_all()
    if code == signals.EXIT_PREEMPTED:
        record(code)
    unlink_file()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end() -> None:
    """Destroy the process group, so that a run with several processes exits with 0.

    Call it after `main` has returned and its model can be freed: if a DDP model is still alive when gloo's threads
    stop, one run in four aborts ("terminate called without an active exception").
    """
    from accelerate import PartialState

    if dist.is_initialized():
        gc.collect()
        collectives.wait_for_all(PartialState())  # the main process may be uploading
        collectives.meet(PartialState())
        collectives.close()
        known.store = None
        PartialState().destroy_process_group()
