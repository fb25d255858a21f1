"""Image files in folders, and the names of many of them: in few bytes for each, memory-mapped."""

import hashlib
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa

from shared.cache.prepared import build_once
from shared.errors import about

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".avif", ".ppm", ".pgm")
AT_ONCE = 1 << 16  # names that are in memory at once


def stored_names(names: Iterable[str]) -> pa.ChunkedArray:
    """The names of files, as the file system encodes them: binary [N], memory-mapped, so no process holds all of them.

    A list takes more than a hundred bytes for each.
    """
    remaining = iter(names)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "names.arrow")
        with pa.OSFile(str(written), "wb") as file, pa.ipc.new_file(file, pa.schema({"name": pa.binary()})) as writer:
            while block := [os.fsencode(name) for name in islice(remaining, AT_ONCE)]:
                writer.write_table(pa.table({"name": pa.array(block, pa.binary())}))
        with written.open("rb") as content:
            digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()

        def build(into: Path) -> None:
            shutil.copy(written, into)

        stored = build_once(f"names-{digest}", build)
    return pa.ipc.open_file(pa.memory_map(str(stored / written.name))).read_all()["name"]


def images_below(root: Path, name: str, passed_over: Counter[str]) -> Iterator[str]:
    """Yield the images in a folder and its subfolders, relative to it, sorted by the parts of their paths.

    At most the names in one folder, and in those above it, are in memory. Hidden files, other files, and links to
    folders or to nothing are skipped and counted in `passed_over`, by reason.

    Raises:
        UserError: a folder cannot be read; the message names it and `name`.
    """
    kept = []
    with about(name), os.scandir(root) as entries:
        for entry in entries:
            ending = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122  Path.suffix takes ten times as long
            is_folder = entry.is_dir(follow_symlinks=False)
            if entry.name.startswith("."):
                passed_over["hidden"] += 1
            elif is_folder or (ending in EXTENSIONS and _is_file(entry)):
                kept.append((entry.name, is_folder))
            else:
                passed_over["no images"] += 1
    for found, is_folder in sorted(kept):
        if is_folder:
            yield from (f"{found}/{file}" for file in images_below(root / found, name, passed_over))
        else:
            yield found


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry of a folder is a regular file, or a link to one. Only links need a system call."""
    return Path(entry).is_file() if entry.is_symlink() else entry.is_file(follow_symlinks=False)
