"""Arrays in the cache that all processes make together: the work on many items is divided into blocks.

A folder NAME with an array in each NAME/*.npy is made in two steps:

1. Each block gets a folder inside NAME.blocks, which is complete or absent. Processes of any launches and machines with
   the same cache folder divide the blocks by file locks alone. After a kill, only the missing blocks are written.
2. Once all blocks are complete, one process joins their arrays into NAME. Then the blocks are removed. Arrays that are
   too large to be written twice stay in the blocks.

The blocks and their order depend on the data alone, so the files are the same for any number of processes.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from shared.cache.prepared import (
    Arrays,
    Unfinished,
    build_if_free,
    build_once,
    cache_dir,
    is_complete,
    place_to_begin,
    read_array,
    share_of_task,
    write_arrays,
)
from shared.errors import UserError
from shared.processes import ending

MOST_PARTS = 2048  # of items that are cut evenly: each has a folder and a lock file until all are joined
POLL_SECONDS = 0.2  # between two looks at the work of other processes


def parts_of(count: int, smallest: int) -> list[range]:
    """The items 0 ... `count` - 1, such as images, in at most MOST_PARTS parts of at least `smallest`."""
    size = max(smallest, -(-count // MOST_PARTS))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def parts_by_size(sizes: Sequence[int] | NDArray[np.int64], size: int) -> list[range]:
    """The items 0 ... len(sizes) - 1 in parts of about `size` in total, or of one larger item."""
    cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // size)) + 1
    return [range(start, end) for start, end in pairwise([0, *cuts.tolist(), len(sizes)])]


@dataclass(frozen=True)
class Division:
    """How the folder `name` of the cache is made."""

    name: str  # contains a digest of everything that the arrays depend on
    parts: Sequence[range]  # of the items; each becomes a block
    make: Callable[[range], Iterator[Arrays]]  # yields the arrays of consecutive batches of a part
    title: str  # of the progress bar: "tokenizing --train_file a.csv"
    places: Mapping[str, str] = field(default_factory=dict)  # see `write_arrays`
    first: Arrays = field(default_factory=dict)  # come before those of the blocks, and exist also without any block
    threads: int = 1  # of this process
    delay: float = 0  # seconds until the progress bar is shown
    by_task: bool = True  # whether the tasks of a job array (`only_task`) divide the parts and end with their share

    @property
    def folder(self) -> Path:
        """The folder that is made."""
        return cache_dir() / self.name

    @property
    def shared(self) -> Path:
        """The folder of the blocks."""
        return cache_dir() / f"{self.name}.blocks"

    def build(self) -> Path:
        """Make the folder unless it is complete, together with all processes that do the same; return it.

        Raises:
            UserError: an item cannot be read, or the cache cannot be written.
            Unfinished: the parts of this task are complete, and some of the other tasks are not.
        """
        while not is_complete(self.folder):
            try:
                self.blocks()
                arrays = chain([self.first], map(self._read, self.parts))
                build_once(self.name, partial(write_arrays, blocks=arrays, places=self.places))
            except UserError:  # perhaps because another process has joined the blocks and removed them
                if not is_complete(self.folder):
                    raise
        shutil.rmtree(self.shared, ignore_errors=True)
        return self.folder

    def blocks(self) -> list[Path]:
        """The folders of the blocks of all parts, made as by `build`. Without `build`, they stay."""
        mine = share_of_task(self.parts) if self.by_task else [*self.parts]
        self._write(mine)
        left = self._missing(self.parts) if len(mine) < len(self.parts) else []
        if left and not is_complete(self.folder):  # else they are missing because another process joined them
            raise Unfinished(f"{self.title}: {len(left):,} of {len(self.parts):,} parts are left to other tasks")
        return [cache_dir() / self._block(part) for part in self.parts]

    def _write(self, mine: list[range]) -> None:
        """Write those parts of this task that are missing, together with other processes."""
        if not (pending := self._missing(mine)):
            return
        # One process prints the progress of all. If only one part is missing, that is the process that writes it.
        silent: dict[str, Any] = {"disable": True} if int(os.environ.get("RANK", 0)) and len(pending) > 1 else {}
        shown: dict[str, Any] = {"unit": " parts", "mininterval": 0.5, "delay": self.delay} | silent
        with tqdm(desc=self.title, total=len(self.parts), **shown) as bar, ThreadPoolExecutor(self.threads) as pool:

            def write(part: range) -> bool:
                if is_complete(self.folder):
                    return False
                fill = partial(write_arrays, blocks=self.make(part), places=self.places)
                written = build_if_free(self._block(part), fill)
                if written and not bar.disable:
                    bar.update(len([*self.shared.glob("*/complete.json")]) - bar.n)
                return written

            while pending:
                first = place_to_begin(len(pending))
                written = sum(pool.map(write, pending[first:] + pending[:first]))
                if (pending := self._missing(pending)) and not written:
                    time.sleep(POLL_SECONDS)

    def _block(self, part: range) -> str:
        """The name of the folder of the block of a part."""
        return f"{self.shared.name}/{part.start:012}-{part.stop:012}"

    def _missing(self, parts: Sequence[range]) -> list[range]:
        """Those of the given parts that are not complete; none once all parts have been joined."""
        if is_complete(self.folder):
            return []
        return [part for part in parts if not is_complete(cache_dir() / self._block(part))]

    def _read(self, part: range) -> Arrays:
        """The arrays of the block of a part.

        Raises:
            UserError: the block was damaged after it was written.
        """
        block = cache_dir() / self._block(part)
        if not is_complete(block):
            raise UserError(f"{block} is damaged: start again, which writes it again")
        return {path.stem: read_array(path) for path in sorted(block.glob("*.npy"))}


def cores_of_process() -> int:
    """This process's equal share of the cores of its machine, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // ending.local_processes())
