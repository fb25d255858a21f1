"""Files and folders: on disk when a function returns, and readable by those who may."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have a file or folder written to disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def usual_permissions(folder: Path) -> None:
    """Give `folder` and all in it the permissions that this process's umask gives to new files and folders.

    safetensors keeps what it writes from everybody but its owner, and so does Python's tempfile.
    """
    probe = folder / ".permissions"
    probe.touch()
    of_files = probe.stat().st_mode & 0o666
    probe.unlink()
    for path in (folder, *folder.rglob("*")):
        path.chmod(of_files | (of_files & 0o444) >> 2 if path.is_dir() else of_files)
