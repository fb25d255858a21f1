"""One run at a time in an output folder: a lock that the kernel releases when its holder dies, however it dies."""

import contextlib
import fcntl
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from shared.errors import UserError

NAME = ".lock"
PATIENCE = 60.0  # seconds for a run that is just ending
_held: dict[Path, IO[str]] = {}


def acquire(output_dir: str | Path) -> Callable[[], None]:
    """Lock a folder for this process; returns what gives it back. Only the main process calls this.

    A holder that lives is waited for, which is said once. A folder that this process holds already is no obstacle: it
    had another run there before.

    Raises:
        UserError: the folder is still in use after a minute; names the process.
    """
    path, deadline = Path(output_dir).resolve() / NAME, time.monotonic() + PATIENCE
    if path in _held:
        release(path, _held[path])
    waiting = False
    while (stream := try_to_lock(path)) is None:
        holder = path.read_text().strip() if path.exists() else ""
        if time.monotonic() > deadline:
            raise UserError(
                f"--output_dir {output_dir} is in use by {holder or 'another run'}: wait until it has ended, or name "
                "another folder"
            )
        if not waiting and holder:
            print(f"{output_dir} is in use by {holder}: waiting {PATIENCE:.0f} s for its end", flush=True)
            waiting = True
        time.sleep(0.2)
    stream.truncate(0)
    stream.write(f"process {os.getpid()} on {socket.gethostname()} ({shlex.join(sys.argv)})\n")
    stream.flush()
    _held[path] = stream
    return lambda: release(path, stream)


def try_to_lock(path: Path) -> IO[str] | None:
    """The lock file at `path`, open and locked; None while another process holds it."""
    stream = path.open("a")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        return None
    except OSError as error:
        print(f"{path} cannot be locked ({error.strerror}): another run in this folder would not be noticed")
        return stream
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), os.fstat(stream.fileno())):
            return stream
    stream.close()  # its last holder has removed it in between: what is locked is no longer the file of that name
    return try_to_lock(path)


def release(path: Path, stream: IO[str]) -> None:
    """Remove a lock file that this process holds, and the lock with it; nothing, if another run of it does by now."""
    if _held.get(path) is stream:
        del _held[path]
        path.unlink(missing_ok=True)
        stream.close()


def release_all() -> None:
    """Give back whatever this process holds: it is about to end without the interpreter's shutdown."""
    for path, stream in list(_held.items()):
        release(path, stream)
