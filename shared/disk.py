"""Tell files from URLs, write and replace files, give the usual permissions, say what mends an error."""

import errno
import os
import re
import shutil
from pathlib import Path

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space within your quota",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EEXIST: "remove this file",
    errno.ENOTDIR: "remove the file that is in the place of a folder",
    errno.ENOENT: "restore this folder, or the mount that had it",
    errno.EROFS: "make this file system writable",
    errno.EACCES: "give yourself the permission to write there",
    errno.EPERM: "give yourself the permission to write there",
}


def is_url(name: str) -> bool:
    """Whether a setting names a URL, such as s3://bucket/folder, and no path of this machine."""
    return "://" in name


def number_of(error: BaseException) -> int:
    """The number of the system's error that an exception reports; 0 if it reports none."""
    in_text = re.search(r"os error (\d+)", str(error))  # of safetensors and tokenizers, which are written in Rust
    return getattr(error, "errno", None) or (int(in_text[1]) if in_text else 0)


def remedy(error: BaseException) -> str:
    """What a user can do about an error in writing a file."""
    return REMEDIES.get(number_of(error), "mend the disk or the mount")


def sync(path: Path) -> None:
    """Return once the file or folder `path` is written to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, text: str) -> None:
    """Write a text file, complete or not at all: a crash leaves the old file or the new one.

    A character that UTF-8 lacks becomes a question mark.
    """
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")  # several processes may write
    partial.write_text(text, encoding="utf-8", errors="replace")
    sync(partial)
    partial.replace(path)


def remove_unfinished(folder: Path, pattern: str = "*.partial-*") -> None:
    """Remove the files and folders NAME.partial-* directly in `folder`, whose writing was killed."""
    for partial in folder.glob(pattern):
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)


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
