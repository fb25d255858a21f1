"""Image files in folders, and the paths of many of them: in few bytes for each, memory-mapped."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.cache.prepared import shared_array
from shared.errors import UserError, about

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".avif", ".ppm", ".pgm")
AT_ONCE = 10_000  # paths that are written or compared at once
END = b"\0"  # ends each name; in no name


class Paths(Sequence[Path]):
    """Paths of files, most of them in one folder. A list of Path objects takes several hundred bytes for each.

    Args:
        root: the folder to which the names are relative.
        names: uint8, the names of the files in the encoding of the file system, each with an `END`.
    """

    def __init__(self, root: Path, names: NDArray[np.uint8]) -> None:
        self.root, self.names = root, names
        blocks = range(0, len(names), 1 << 20)
        self.ends = shared_array(
            lambda: (start + np.flatnonzero(names[start : start + blocks.step] == END[0]) for start in blocks), np.int64
        )

    @classmethod
    def of(cls, root: Path, names: Callable[[], Iterable[str | Path]]) -> "Paths":
        """The paths of files: memory-mapped if they are many, so that no process holds all of them.

        Args:
            root: the folder to which the names are relative.
            names: returns the names, relative to `root` or absolute. It may be called a second time.

        Raises:
            UserError: the second call returned other names.
        """
        digests: list[str] = []

        def blocks() -> Iterator[NDArray[np.uint8]]:
            remaining, digest = iter(names()), hashlib.blake2b()
            while block := b"".join(os.fsencode(name) + END for name in islice(remaining, AT_ONCE)):
                digest.update(block)
                yield np.frombuffer(block, np.uint8)
            digests.append(digest.hexdigest())
            if digests[0] != digests[-1]:
                raise UserError(f"the files in {root} changed while they were listed: start again")

        return cls(root, shared_array(blocks, np.uint8))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> Path:  # type: ignore[override]  # no slices
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        number = i % len(self)
        start = int(self.ends[number - 1]) + 1 if number else 0
        return self.root / os.fsdecode(self.names[start : int(self.ends[number])].tobytes())

    def absolute(self, numbers: NDArray[np.int64]) -> Iterator[str]:
        """The absolute paths of the files `numbers`."""
        return (str(self[number].absolute()) for number in numbers.tolist())

    def common_folder(self) -> str:
        """The absolute path of the deepest folder that contains all files."""
        common: list[str] = []
        for start in range(0, len(self), AT_ONCE):
            paths = self.absolute(np.arange(start, min(start + AT_ONCE, len(self))))
            common = [os.path.commonpath([*common, *{path.rpartition(os.sep)[0] or os.sep for path in paths}])]
        return common[0]


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
