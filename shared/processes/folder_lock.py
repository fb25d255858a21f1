"""One run at a time in an output folder: a file lock that the kernel releases when its holder dies, however it dies.

The lock is `filelock`'s, as in shared/cache/prepared.py. This module adds three things: the file names its holder,
the file is removed at the end, and on a file system without locks the run starts unlocked, with a warning.
"""

import contextlib
import os
import shlex
import socket
import sys
from pathlib import Path

from filelock import FileLock, Timeout

from shared.errors import UserError

NAME = ".lock"
WAIT_SECONDS = 60.0  # seconds to wait for a run that is about to end
POLL_INTERVAL = 0.2  # seconds
_held: list[FileLock] = []


def acquire(output_dir: str | Path, flag: str = "--output_dir") -> None:
    """Lock a folder, which `flag` names, for this process. Only the main process calls this.

    If another process holds the lock, this prints so once and waits for up to a minute.

    Raises:
        UserError: the folder is still in use after a minute; names the process.
    """
    path = Path(output_dir).resolve() / NAME
    # A soft lock is a file that exists: it would outlive a holder that was killed on another machine. And the thread
    # that receives signals may release the lock.
    lock = FileLock(path, fallback_to_soft=False, thread_local=False)
    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            if holder := holder_of(path):
                seconds, then = f"{WAIT_SECONDS:.0f} s", "once it has ended, this one goes on in the folder"
                print(f"{output_dir} is in use by {holder}: waiting {seconds} for it; {then}", flush=True)
            lock.acquire(timeout=WAIT_SECONDS, poll_interval=POLL_INTERVAL)
    except Timeout:
        raise UserError(
            f"{flag} {output_dir} is in use by {holder_of(path) or 'another run'}: wait until it has ended, or "
            "name another folder"
        ) from None
    except OSError as error:
        print(f"{path} cannot be locked ({error.strerror}): another run in this folder would not be noticed")
    path.write_text(f"process {os.getpid()} on {socket.gethostname()} ({shlex.join(sys.argv)})", "utf-8", "replace")
    _held.append(lock)


def holder_of(path: Path) -> str:
    """Return the holder that the lock file at `path` names; "" if the file has just been removed."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_text().partition("\n")[0][:300]
    return ""


def release_all() -> None:
    """Release all locks of this process and remove their files."""
    while _held:
        lock = _held.pop()
        # Removed while locked: a waiting process then notices that its locked file no longer has this name.
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
