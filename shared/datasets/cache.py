"""Prepared data is kept between runs: built once per machine, by one process, complete or absent."""

import glob
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from shared.checkpoint_writer import sync, usual_permissions
from shared.errors import UserError


def cache_dir() -> Path:
    """The folder for prepared data: $ACCELERATE_RECIPES_CACHE, or accelerate-recipes in the user's cache folder."""
    if given := os.environ.get("ACCELERATE_RECIPES_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "accelerate-recipes"


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """The folder `cache_dir()/name`; when it is missing, `build(folder)` fills it.

    The first process of a machine to come here builds, into a temporary folder that is renamed when complete; the
    others wait on a file lock, not in a collective, which would time out while they wait. `name` carries a digest of
    everything the content depends on, so a folder that exists is right.
    """
    folder = cache_dir() / name
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.exists():
                for killed in folder.parent.glob(f"{glob.escape(folder.name)}.partial-*"):  # nobody else builds it now
                    shutil.rmtree(killed, ignore_errors=True)
                partial = Path(tempfile.mkdtemp(prefix=folder.name + ".partial-", dir=folder.parent))
                try:
                    build(partial)
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
