"""The paths of many image files, in few bytes for each, memory-mapped."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

import numpy as np
from numpy.typing import NDArray

from shared.datasets.prepared import build_once, mapped_file, read_array

AT_ONCE = 10_000  # paths that are compared at once


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
    def of(root: Path, groups: Iterable[Iterable[str | Path]]) -> "Paths":
        """The paths of all groups, relative to `root` or absolute: stored once per machine, and memory-mapped."""
        content, sizes = [], []
        for group in groups:
            encoded = [os.fsencode(path) for path in group]
            content.append(b"".join(encoded))
            sizes.append(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        names = np.frombuffer(b"".join(content), np.uint8)
        ends = np.concatenate([np.empty(0, np.int64), *sizes]).cumsum()

        def build(folder: Path) -> None:
            np.save(folder / "names.npy", names)
            np.save(folder / "ends.npy", ends)

        key = hashlib.blake2b(names.data, digest_size=16)
        key.update(ends.data)
        folder = build_once(f"paths-{key.hexdigest()}", build)
        return _stored(root, folder)

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
        number = i % len(self)
        start = int(self.ends[number - 1]) if number else 0
        return self.root / os.fsdecode(self.names[start : int(self.ends[number])].tobytes())

    def absolute(self, numbers: NDArray[np.int64]) -> Iterator[str]:
        """The absolute paths of the files `numbers`, as text."""
        return (str(self[number].absolute()) for number in numbers.tolist())

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
