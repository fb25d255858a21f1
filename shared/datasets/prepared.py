"""Prepared data is kept between runs: built once per machine, by one process, complete or absent."""

import glob
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

from shared.disk import sync, usual_permissions
from shared.errors import UserError

RECORD = "complete.json"  # what `fingerprints` found when the folder was built
EDGE = 1 << 16  # bytes at each end of a file that are compared at each start: headers and tails, of any size of file


def cache_dir() -> Path:
    """The folder for prepared data: $ACCELERATE_RECIPES_CACHE, or accelerate-recipes in the user's cache folder."""
    if given := os.environ.get("ACCELERATE_RECIPES_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelerate-recipes"


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `cache_dir()/name`; when it is missing, `build(folder)` fills it.

    The first process of a machine to come here builds, into a temporary folder that is renamed when complete; the
    others wait on a file lock, not in a collective, which would time out while they wait. `name` carries a digest of
    everything the content depends on, so a folder that is complete is right; a damaged one is built again, in one line.
    """
    folder = cache_dir() / name
    if is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not is_complete(folder):
                set_aside(folder)
                for killed in folder.parent.glob(f"{glob.escape(folder.name)}.partial-*"):  # nobody else builds it now
                    shutil.rmtree(killed, ignore_errors=True)
                partial = Path(tempfile.mkdtemp(prefix=folder.name + ".partial-", dir=folder.parent))
                try:
                    build(partial)
                    (partial / RECORD).write_text(json.dumps(fingerprints(partial)))
                    usual_permissions(partial)
                    for path in (*partial.rglob("*"), partial):
                        sync(path)
                    partial.rename(folder)
                    sync(folder.parent)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"cannot write prepared data to {folder.parent} ({reason}): set ACCELERATE_RECIPES_CACHE"
        ) from None
    return folder


def fingerprints(folder: Path) -> dict[str, list[Any]]:
    """Size and a digest of both ends of each file in a folder, by its name."""
    found: dict[str, list[Any]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != RECORD):
        size = path.stat().st_size
        with path.open("rb") as file:
            ends = file.read(EDGE)
            file.seek(max(0, size - EDGE))
            found[str(path.relative_to(folder))] = [
                size,
                hashlib.blake2b(ends + file.read(EDGE), digest_size=8).hexdigest(),
            ]
    return found


def is_complete(folder: Path) -> bool:
    """Whether a folder is there as it was built, as far as sizes and both ends of its files tell."""
    try:
        return bool(json.loads((folder / RECORD).read_text()) == fingerprints(folder))
    except (OSError, ValueError):
        return False


def set_aside(folder: Path) -> None:
    """Remove a folder that is not as it was built, if there is one; who has mapped its files keeps them."""
    if not folder.exists():
        return
    print(f"{folder} is damaged, or from an older version: it is prepared again", file=sys.stderr)
    aside = Path(tempfile.mkdtemp(prefix=folder.name + ".partial-", dir=folder.parent))
    folder.rename(aside / "damaged")
    shutil.rmtree(aside, ignore_errors=True)
