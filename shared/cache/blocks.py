"""Folders of the cache that all processes make together: the work on many items is divided into blocks.

A folder NAME is made in three steps:

1. `begin` creates the files that all blocks share, in the folder NAME.blocks-of-SIZE.
2. Each block gets a folder inside, which is complete or absent. Processes of any launches and machines with the same
   cache folder divide the blocks by file locks alone. After a kill, only the missing blocks are written.
3. Once all blocks are complete, one process joins them into NAME. Then the folder of the blocks is removed.

The files of NAME do not depend on the number of processes, because `join` takes the blocks in their order.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from shared.cache.prepared import (
    Unfinished,
    build_if_free,
    build_once,
    cache_dir,
    is_complete,
    locked,
    remove_damaged,
    share_of_task,
    until_complete,
)
from shared.disk import usual_permissions
from shared.errors import UserError
from shared.processes import exit_reasons

MOST_BLOCKS = 2048  # each has a folder and a lock file until all are joined
DIGITS = 12  # of the name of a block's folder, which is the number of its first item
BEGUN = "begun.json"  # {name: size in bytes} of the files that `begin` created


@dataclass(frozen=True)
class Blocks:
    """How the folder `name` of the cache is made for the items 0 ... `count` - 1, such as images."""

    name: str
    count: int
    smallest: int  # items in a block; more if there would be more than MOST_BLOCKS blocks
    write: Callable[[Path, Path, range], None]  # write(shared, folder, items) fills the folder of a block
    join: Callable[[Path, Path, list[Path]], None]  # join(shared, folder, blocks) fills the folder `name`
    verb: str  # of the progress bar: "decoding"
    unit: str  # what an item is, in the plural: "images"
    source: str  # where the items come from, in messages: "--train_dir photos"
    begin: Callable[[Path], None] | None = None  # begin(shared) creates the files that all blocks share, in full size
    delay: float = 0  # seconds until the progress bar is shown
    threads_per_core: int = 1
    most_threads: int | None = None  # of a process; None: no maximum
    by_task: bool = True  # whether the tasks of a job array (`only_task`) divide the blocks and end with their share

    @property
    def folder(self) -> Path:
        """The folder that is made."""
        return cache_dir() / self.name

    @property
    def size(self) -> int:
        """The number of items in a block; the last one may have fewer."""
        return max(self.smallest, -(-self.count // MOST_BLOCKS))

    @property
    def shared(self) -> Path:
        """The folder of the blocks and of the files that they share."""
        return cache_dir() / f"{self.name}.blocks-of-{self.size}"

    def build(self) -> Path:
        """Make the folder unless it is complete, together with all processes that do the same; return it.

        Raises:
            UserError: an item cannot be read, or the cache cannot be written.
            Unfinished: the blocks of this task are complete, and some of the other tasks are not.
        """
        starts = [*range(0, self.count, self.size)]
        mine = share_of_task(starts) if self.by_task else starts
        if not is_complete(self.folder):
            try:
                if self._begin():
                    self._write_blocks(mine)
                    self._require([*set(starts).difference(mine)])
                    build_once(self.name, lambda folder: self.join(self.shared, folder, self._blocks()))
            except UserError:  # perhaps because another process has joined the blocks and removed them
                if not is_complete(self.folder):
                    raise
        shutil.rmtree(self.shared, ignore_errors=True)
        return self.folder

    def _begin(self) -> bool:
        """Create the folder of the blocks unless it exists; False if the folder `name` is complete."""
        with locked(self.folder):  # as for the join: the blocks are removed only when `name` is complete
            if is_complete(self.folder):
                return False
            if not self._is_begun():
                remove_damaged(self.folder)
                shutil.rmtree(self.shared, ignore_errors=True)
                partial = Path(tempfile.mkdtemp(prefix=f"{self.name}.partial-", dir=cache_dir()))
                try:
                    if self.begin:
                        self.begin(partial)
                    sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
                    (partial / BEGUN).write_text(json.dumps(sizes))
                    usual_permissions(partial)
                    partial.rename(self.shared)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        return True

    def _is_begun(self) -> bool:
        """Whether the shared files exist with their sizes. Otherwise the blocks are worthless."""
        try:
            sizes = json.loads((self.shared / BEGUN).read_text())
            return all((self.shared / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError):
            return False

    def _write_blocks(self, mine: list[int]) -> None:
        """Write those blocks of this task that are missing, together with other processes."""
        if not (pending := self._missing(mine)):
            return
        # One process prints the progress of all. If only one block is missing, that is the process that writes it.
        silent: dict[str, Any] = {"disable": True} if int(os.environ.get("RANK", 0)) and len(pending) > 1 else {}
        shown = {"desc": f"{self.verb} {self.source}", "unit": f" {self.unit}", "delay": self.delay, **silent}
        threads = self.threads_per_core * cores_of_process()  # Pillow and tokenizers release the GIL
        with (
            tqdm(total=self.count, mininterval=0.5, **shown) as bar,
            ThreadPoolExecutor(min(threads, self.most_threads or threads)) as pool,
        ):

            def show() -> None:
                if not bar.disable:
                    complete = len([*self.shared.glob("?" * DIGITS)])  # 0 if another process has joined the blocks
                    bar.update(min(complete * self.size or self.count, self.count) - bar.n)

            def write(pending: list[int], _helping: bool) -> int:
                written = 0
                for is_new in pool.map(self._write_block, pending):
                    written += is_new
                    if is_new:
                        show()
                return written

            until_complete(pending, self._missing, write)
            show()

    def _require(self, others: list[int]) -> None:
        """Raise Unfinished if one of the blocks of other tasks is missing."""
        if (left := self._missing(others)) and not is_complete(self.folder):
            items = sum(len(self._items(start)) for start in left)
            raise Unfinished(f"{items:,} of {self.count:,} {self.unit} of {self.source} are left to other tasks")

    def _write_block(self, start: int) -> bool:
        """Write a block unless it is complete or another process is writing it; return whether this call wrote it."""
        written = False

        def write(folder: Path) -> None:
            nonlocal written
            (self.shared / BEGUN).stat()  # fails if the blocks have been joined and removed
            self.write(self.shared, folder, self._items(start))
            written = True

        build_if_free(f"{self.shared.name}/{self._block(start).name}", write)
        return written

    def _items(self, start: int) -> range:
        """The numbers of the items of a block."""
        return range(start, min(start + self.size, self.count))

    def _block(self, start: int) -> Path:
        """The folder of a block."""
        return self.shared / f"{start:0{DIGITS}}"

    def _blocks(self) -> list[Path]:
        """The folders of all blocks, in order."""
        return [self._block(start) for start in range(0, self.count, self.size)]

    def _missing(self, starts: list[int]) -> list[int]:
        """Those of the given blocks that are not complete."""
        return [start for start in starts if not is_complete(self._block(start))]


def cores_of_process() -> int:
    """This process's equal share of the cores of its machine, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // exit_reasons.local_processes())


@contextmanager
def opened_before_end(path: Path, distance: int, read_soon: bool = True) -> Iterator[IO[bytes]]:
    """Open a file for writing at `distance` bytes before its end; afterwards, what was written is on the disk.

    The system keeps it in memory as well, unless `read_soon` is False.

    Several machines may write to the same file at once, each its own bytes. The file is opened for writing only, since
    a client of NFS that reads a page may later write the whole page, with outdated bytes of other machines.
    """
    with os.fdopen(os.open(path, os.O_WRONLY), "wb") as file:
        file.seek(-distance, os.SEEK_END)
        yield file
        file.flush()
        os.fsync(file.fileno())
        if not read_soon and hasattr(os, "posix_fadvise"):  # macOS lacks it
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def move_or_link(path: Path, folder: Path) -> None:
    """Put the file `path` into `folder`. It keeps its old name as well where the file system has hard links."""
    try:
        os.link(path, folder / path.name)
    except OSError:
        path.rename(folder / path.name)
