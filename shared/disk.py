"""Write files and folders to disk before continuing, give them the usual permissions, and tell URLs from paths."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return once the file or folder `path` is written to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def usual_permissions(folder: Path) -> None:
    """Give `folder` and everything in it the permissions that this process's umask gives to new files and folders.

    Without this, only the owner can read files written by safetensors or Python's tempfile.
    """
    probe = folder / ".permissions"
    probe.touch()
    of_files = probe.stat().st_mode & 0o666
    probe.unlink()
    for path in (folder, *folder.rglob("*")):
        path.chmod(of_files | (of_files & 0o444) >> 2 if path.is_dir() else of_files)


def is_url(name: str) -> bool:
    """Whether a setting names a URL, such as s3://bucket/folder, and no path of this machine."""
    return "://" in name
