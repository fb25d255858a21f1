"""One run at a time in an output folder: a lock that the kernel releases when its holder dies, however it dies."""

import contextlib
import fcntl
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from shared.errors import UserError
from shared.processes import accelerate_state

NAME = ".lock"
PATIENCE = 60.0  # seconds for a run that is just ending
_held: dict[Path, IO[str]] = {}


def acquire(output_dir: str | Path) -> None:
    """Lock a folder for this process. Only the main process calls this.

    A holder that lives is waited for, which is said once.

    Raises:
        UserError: the folder is still in use after a minute; names the process.
    """
    path, deadline = Path(output_dir).resolve() / NAME, time.monotonic() + PATIENCE
    waiting = False
    while (stream := try_to_lock(path)) is None:
        holder = ""
        with contextlib.suppress(FileNotFoundError):  # it has ended just now
            holder = path.read_text().partition("\n")[0][:300]
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


def release_all() -> None:
    """Give back what this process holds, and remove the file."""
    while _held:
        path, stream = _held.popitem()
        path.unlink(missing_ok=True)
        stream.close()


@contextlib.contextmanager
def freed_after(output_dir: str | Path) -> Iterator[None]:
    """However the block ends, the folder that it locked is free again, and Accelerate's state is gone.

    A folder that the block made is removed if nothing is in it, as after a dry run and a refusal. The process can then
    start another run.
    """
    is_new = not Path(output_dir).exists()
    try:
        yield
    finally:
        release_all()
        accelerate_state.forget()
        if is_new:
            with contextlib.suppress(OSError):
                Path(output_dir).rmdir()
