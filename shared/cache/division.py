"""Arrays in the cache that all processes make together: the work on many items is divided into blocks.

A folder NAME with an array in each NAME/*.npy is made in two steps:

1. Each block gets a folder inside NAME.blocks, which is complete or absent. Processes of any launches and machines with
   the same cache folder divide the blocks by file locks alone. After a kill, only the missing blocks are written.
2. Once all blocks are complete, one process joins their arrays into NAME. Then the blocks are removed.

The blocks and their order depend on the data alone, so the files of NAME are the same for any number of processes.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from shared.cache.prepared import (
    Arrays,
    Unfinished,
    arrays_writer,
    build_if_free,
    build_once,
    cache_dir,
    can_be_built,
    is_complete,
    locked,
    read_array,
    share_of_task,
    until_complete,
)
from shared.errors import UserError
from shared.processes import ending

MOST_PARTS = 2048  # of items that are cut evenly: each has a folder and a lock file until all are joined
LAST = "last"  # a file in the last block of a part

Block = tuple[Iterator[Arrays], Callable[[], bool]]  # arrays of batches; whether it was the last, known after reading


class BlocksRemovedError(Exception):
    """Another division had blocks in common with this one, and has removed them."""


@dataclass(frozen=True)
class Part:
    """Items that can be read without those before them."""

    name: str  # of its blocks; equal parts may have equal names
    blocks: Callable[[], Iterator[Block]]  # yields at least one; a block that is not read is skipped
    long: bool = False  # whether it may have many blocks, so that several processes should read it


def parts_of(count: int, smallest: int, make: Callable[[range], Iterator[Arrays]]) -> list[Part]:
    """Cut the items 0 ... `count` - 1 into parts of one block.

    Args:
        count: the number of items, such as images.
        smallest: items in a part; more if there would be more than MOST_PARTS.
        make: yields the arrays of consecutive batches of a range of items.
    """
    size = max(smallest, -(-count // MOST_PARTS))

    def blocks(items: range) -> Iterator[Block]:
        yield make(items), lambda: True

    ranges = [range(start, min(start + size, count)) for start in range(0, count, size)]
    return [Part(f"{items.start:012}-{items.stop:012}", partial(blocks, items)) for items in ranges]


@dataclass(frozen=True)
class Division:
    """How the folder `name` of the cache is made."""

    name: str  # contains a digest of everything that the arrays depend on
    parts: Sequence[Part]
    title: str  # of the progress bar: "tokenizing --train_file a.csv"
    places: Mapping[str, str] = field(default_factory=dict)  # see `arrays_writer`
    first: Arrays = field(default_factory=dict)  # come before those of the blocks, and exist also without any block
    file: str = ""  # in the folder of the blocks: a file of full size that they share and that is moved into `name`
    create: Callable[[Path], object] | None = None  # creates this file
    blocks_in: str = ""  # the name of the folder of the blocks, if divisions with equal parts share it
    threads: int = 1  # of this process
    delay: float = 0  # seconds until the progress bar is shown
    by_task: bool = True  # whether the tasks of a job array (`only_task`) divide the parts and end with their share
    lengths: dict[str, int] = field(default_factory=dict)  # the number of blocks of parts that were read to their end

    @property
    def folder(self) -> Path:
        """The folder that is made."""
        return cache_dir() / self.name

    @property
    def shared(self) -> Path:
        """The folder of the blocks."""
        return blocks_folder(self.blocks_in or self.name)

    def build(self) -> Path:
        """Make the folder unless it is complete, together with all processes that do the same; return it.

        Raises:
            UserError: an item cannot be read, or the cache cannot be written.
            Unfinished: the parts of this task are complete, and some of the other tasks are not.
        """
        parts = [*{part.name: part for part in self.parts}.values()]
        mine = share_of_task(parts) if self.by_task else parts
        while not is_complete(self.folder):
            try:
                self._create_file()
                self._write(mine)
                left = self._missing(parts) if len(mine) < len(parts) else []
                if left and not is_complete(self.folder):  # else they are missing because another process joined them
                    raise Unfinished(f"{self.title}: {len(left):,} of {len(parts):,} parts are left to other tasks")
                build_once(self.name, self._join)
            except BlocksRemovedError:
                continue
            except UserError:  # perhaps because another process has joined the blocks and removed them
                if not is_complete(self.folder):
                    raise
        self._remove_blocks(parts)
        return self.folder

    def _create_file(self) -> None:
        """Create the file that the blocks share, unless it exists. Without it, the blocks are worthless."""
        if self.create is None:
            return
        with locked(self.folder):  # as for the join: the blocks are removed only when `name` is complete
            if not is_complete(self.folder) and not (self.shared / self.file).exists():
                shutil.rmtree(self.shared, ignore_errors=True)
                self.shared.mkdir()
                half = self.shared / "half"
                self.create(half)
                half.rename(self.shared / self.file)

    def _write(self, mine: list[Part]) -> None:
        """Write those parts of this task that are missing, together with other processes."""
        if not (pending := self._missing(mine)):
            return
        # One process prints the progress of all. If only one part is missing, that is the process that writes it.
        silent: dict[str, Any] = {"disable": True} if int(os.environ.get("RANK", 0)) and len(pending) > 1 else {}
        total = None if any(part.long for part in self.parts) else len(self.parts)
        with (
            tqdm(desc=self.title, total=total, unit=" parts", mininterval=0.5, delay=self.delay, **silent) as bar,
            ThreadPoolExecutor(self.threads) as pool,
        ):

            def show() -> None:
                if not bar.disable:
                    bar.update(len([*self.shared.glob("*/complete.json")]) - bar.n)

            def write(pending: list[Part], helping: bool) -> int:
                written = 0
                for more in pool.map(partial(self._write_part, helping=helping, show=show), pending):
                    written += more
                return written

            until_complete(pending, self._missing, write)

    def _write_part(self, part: Part, helping: bool, show: Callable[[], None]) -> int:
        """Write the missing blocks of a part, except those that other processes write; return how many were written.

        If another process writes one of them, the rest of the part is left to it, except if this process is `helping`
        with a long part. A part with known length is not read if nothing can be written.
        """
        known = range(self.lengths.get(part.name, 0))
        if is_complete(self.folder) or (known and not any(can_be_built(self._block(part, i)) for i in known)):
            return 0
        written = 0
        for number, (batches, is_last) in enumerate(part.blocks()):

            def build(folder: Path, batches: Iterator[Arrays] = batches, is_last: Any = is_last) -> None:
                nonlocal written
                with arrays_writer(folder, self.places) as append:
                    for arrays in batches:
                        append(arrays)
                if is_last():
                    (folder / LAST).touch()
                written += 1

            block = self._block(part, number)
            if build_if_free(block, build):
                show()
                if (cache_dir() / block / LAST).exists():
                    self.lengths[part.name] = number + 1
                    break
            elif not (helping and part.long):
                break
        else:
            self.lengths[part.name] = number + 1
        return written

    def _block(self, part: Part, number: int) -> str:
        """The name of the folder of a block."""
        return f"{self.shared.name}/{part.name}-{number:04}"

    def _missing(self, parts: list[Part]) -> list[Part]:
        """Those of the given parts that are not complete; none once all parts have been joined."""
        if is_complete(self.folder):
            return []
        return [part for part in parts if self._blocks(part) is None]

    def _blocks(self, part: Part) -> list[Path] | None:
        """The folders of the blocks of a part, in order; None if one is missing or damaged."""
        found: list[Path] = []
        while not found or not (found[-1] / LAST).exists():
            found.append(cache_dir() / self._block(part, len(found)))
            if not is_complete(found[-1]):
                return None
        return found

    def _join(self, folder: Path) -> None:
        """Write the arrays of all parts."""
        with arrays_writer(folder, self.places) as append:
            append(self.first)
            for part in self.parts:
                if (blocks := self._blocks(part)) is None:
                    raise BlocksRemovedError
                for block in blocks:
                    append({path.stem: read_array(path) for path in sorted(block.glob("*.npy"))})
        if self.file:
            move_or_link(self.shared / self.file, folder)

    def _remove_blocks(self, parts: list[Part]) -> None:
        """Remove the blocks. Others in the same folder stay, as they may belong to another division."""
        if not self.blocks_in:
            shutil.rmtree(self.shared, ignore_errors=True)
        elif self.shared.exists():
            names = {part.name for part in parts}  # without "-"
            for path in [path for path in self.shared.iterdir() if path.name.partition("-")[0] in names]:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def blocks_folder(name: str) -> Path:
    """The folder of the blocks of the division `name`."""
    return cache_dir() / f"{name}.blocks"


def cores_of_process() -> int:
    """This process's equal share of the cores of its machine, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // ending.local_processes())


@contextmanager
def opened_before_end(path: Path, distance: int) -> Iterator[IO[bytes]]:
    """Open a file for writing at `distance` bytes before its end; afterwards, what was written is on the disk.

    Several machines may write to the same file at once, each its own bytes. The file is opened for writing only, since
    a client of NFS that reads a page may later write the whole page, with outdated bytes of other machines.
    """
    with os.fdopen(os.open(path, os.O_WRONLY), "wb") as file:
        file.seek(-distance, os.SEEK_END)
        yield file
        file.flush()
        os.fsync(file.fileno())


def move_or_link(path: Path, folder: Path) -> None:
    """Put the file `path` into `folder`. It keeps its old name as well where the file system has hard links."""
    try:
        os.link(path, folder / path.name)
    except OSError:
        path.rename(folder / path.name)
