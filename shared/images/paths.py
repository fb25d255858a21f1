"""Image files in folders, and the paths of many of them: in few bytes for each, memory-mapped."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from shared.cache.prepared import array_writer, build_once, mapped_file, read_array
from shared.errors import UserError

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".avif", ".ppm", ".pgm")
AT_ONCE = 10_000  # paths that are written or compared at once
FOLDER = "\0"  # marks a folder among the sorted names of its parent; in no name, and before every character of one


class Paths(Sequence[Path]):
    """Paths of files, most of them in one folder. A list of Path objects takes several hundred bytes for each.

    Args:
        root: the folder to which the names are relative.
        names: uint8, the concatenated names of the files, in the encoding of the file system.
        ends: int64 [N], where each name ends.
    """

    def __init__(self, root: Path, names: NDArray[np.uint8], ends: NDArray[np.int64]) -> None:
        self.root, self.names, self.ends = root, names, ends

    @staticmethod
    def of(root: Path, names: Callable[[], Iterable[str | Path]]) -> "Paths":
        """The paths of files: stored once per machine, and memory-mapped. No process holds all of them.

        Args:
            root: the folder to which the names are relative.
            names: returns the names, relative to `root` or absolute. It is called a second time if they are not stored
                yet.

        Raises:
            UserError: the second call returned other names.
        """

        def read(write: Callable[[NDArray[np.uint8], NDArray[np.int64]], object]) -> str:
            of_names, of_ends = (hashlib.blake2b(digest_size=16) for _ in range(2))
            for content, ends in _in_blocks(names()):
                of_names.update(content.data)
                of_ends.update(ends.data)
                write(content, ends)
            return of_names.hexdigest() + of_ends.hexdigest()

        key = read(lambda *_: None)

        def build(folder: Path) -> None:
            with (
                array_writer(folder / "names.npy", np.uint8) as add_names,
                array_writer(folder / "ends.npy", np.int64) as add_ends,
            ):
                again = read(lambda content, ends: (add_names(content), add_ends(ends)))
            if again != key:
                raise UserError(f"the files in {root} changed while they were listed: start again")

        return _stored(root, build_once(f"paths-{key}", build))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, i: int) -> Path: ...
    @overload
    def __getitem__(self, i: slice) -> list[Path]: ...
    def __getitem__(self, i: int | slice) -> Path | list[Path]:
        if isinstance(i, slice):
            return [self[number] for number in range(*i.indices(len(self)))]
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        return self.root / self._name(i % len(self))

    def _name(self, number: int) -> str:
        start = int(self.ends[number - 1]) if number else 0
        return os.fsdecode(self.names[start : int(self.ends[number])].tobytes())

    def absolute(self, numbers: NDArray[np.int64]) -> Iterator[str]:
        """The absolute paths of the files `numbers`: `str(self[number].absolute())` in a quarter of the time."""
        above = str(self.root.absolute()).removesuffix("/") + "/"
        for number in numbers.tolist():
            name = self._name(number)
            plain = {"", "."}.isdisjoint(name.split("/"))  # not absolute, and nothing that Path would remove
            yield above + name if plain else str(self[number].absolute())

    def common_folder(self) -> str:
        """The absolute path of the deepest folder that contains all files."""
        common: list[str] = []
        for start in range(0, len(self), AT_ONCE):
            paths = self.absolute(np.arange(start, min(start + AT_ONCE, len(self))))
            common = [os.path.commonpath([*common, *{path.rpartition(os.sep)[0] or os.sep for path in paths}])]
        return common[0]

    def __reduce__(self) -> tuple[Callable[..., "Paths"], tuple[Path, Path]]:
        file = mapped_file(self.names)
        assert file is not None
        return _stored, (self.root, file.parent)


def _stored(root: Path, folder: Path) -> Paths:
    return Paths(root, read_array(folder / "names.npy"), read_array(folder / "ends.npy"))


def _in_blocks(names: Iterable[str | Path]) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Yield names in blocks: concatenated, in the encoding of the file system, and where each ends among all names."""
    remaining, end = iter(names), 0
    while block := [os.fsencode(name) for name in islice(remaining, AT_ONCE)]:
        ends = end + np.fromiter(map(len, block), np.int64, len(block)).cumsum()
        yield np.frombuffer(b"".join(block), np.uint8), ends
        end = int(ends[-1])


def images_below(root: Path, name: str, passed_over: Counter[str]) -> Iterator[str]:
    """Yield the images in a folder and its subfolders, relative to it, sorted by the parts of their paths.

    At most the names in one folder, and in those above it, are in memory. Skipped files are counted in `passed_over`,
    by reason.

    Raises:
        UserError: a folder cannot be read; the message names it and `name`.
    """
    kept = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                is_folder, is_link = entry.is_dir(follow_symlinks=False), entry.is_symlink()
                ending = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122  Path.suffix takes ten times as long
                named_so = ending in EXTENSIONS
                if entry.name.startswith("."):
                    passed_over["hidden"] += 1
                    continue
                if is_folder:
                    kept.append(entry.name + FOLDER)
                if is_folder and not named_so:
                    continue
                if is_folder or (is_link and Path(entry).is_dir()) or (named_so and not _is_file(entry)):
                    passed_over["no regular file (a folder, or a link that is broken or leads to one)"] += 1
                elif not named_so:
                    passed_over[f"not named like an image ({ending or 'no extension'})"] += 1
                else:
                    kept.append(entry.name)
    except OSError as error:
        problem = f"{error.filename} cannot be read ({error.strerror}): check its permissions"
        raise UserError(f"{name}: {problem}") from None
    for found in sorted(kept):
        if found.endswith(FOLDER):
            folder = found.removesuffix(FOLDER)
            yield from (f"{folder}/{file}" for file in images_below(root / folder, name, passed_over))
        else:
            yield found


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry of a folder is a regular file, or a link to one. Only links need a system call."""
    return Path(entry).is_file() if entry.is_symlink() else entry.is_file(follow_symlinks=False)
