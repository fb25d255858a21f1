"""The tokens of a prepared corpus behind a URL: read in blocks, ahead of the step that needs them, through a cache.

The files of tokens are cut into blocks of equal size, and a block is one request. The index has a digest of each block.

The cache is a file of a fixed size, which the processes of a machine share. Block b belongs into slot b modulo the
number of slots. Whatever a process reads from a slot is compared with the digest of the block. Therefore the cache has
neither a list of its blocks nor a lock: if the slot is empty, damaged, half-written or has another block, the digest
differs, and the block is read from the URL.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shared.cache.prepared import ranges, read_array
from shared.disk import NO_SPACE, remedy
from shared.errors import UserError
from shared.plan.batches import MicroBatch
from shared.plan.draws import Ints
from shared.remote.object_store import RemoteFolder

THREADS = 32  # requests of a process at once: at 50 ms each, 640 blocks per second
SAMPLES_AHEAD = 512  # how many samples a process begins to read before the ones that are needed
MEMORY_BYTES = 1 << 26  # of blocks that a process keeps: about twice those of the samples ahead


def block_digest(content: bytes) -> int:
    """The digest of a block by XXH3, which detects damage and no forgery."""
    return xxhash.xxh3_64_intdigest(content)


def reserve(file: Path, size: int, flag: str) -> None:
    """Make a file of `size` bytes, or change the size of an existing one, with all its space on the disk.

    Several processes may call this at once. A process that uses the file may go on, as its reads are verified.

    Raises:
        UserError: the disk has no room; names `flag`.
    """
    before = file.stat().st_size if file.exists() else 0
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as opened:
            if before > size:
                opened.truncate(size)
            os.posix_fallocate(opened.fileno(), 0, size)
    except OSError as error:
        if before < size and file.exists() and error.errno in NO_SPACE:
            os.truncate(file, before)
        raise UserError(
            f"{flag}: {file.parent} has no room for {size / 1e9:,.3g} GB ({error.strerror or error}): lower it, "
            f"{remedy(error)}, or set ACCELERATE_RECIPES_CACHE to another folder"
        ) from None


def begun_ahead(
    prefetch: Callable[[Ints], None], schedule: Iterable[MicroBatch], samples: int = SAMPLES_AHEAD
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of `schedule`, each after `prefetch` got its samples and so many of the next ones."""
    coming: deque[MicroBatch] = deque()
    ahead = 0
    for micro_batch in schedule:
        prefetch(micro_batch.samples)
        coming.append(micro_batch)
        ahead += len(micro_batch.samples)
        while ahead > samples and len(coming) > 1:
            ahead -= len(coming[0].samples)
            yield coming.popleft()
    yield from coming


class RemoteTokens:
    """The tokens of one corpus of a prepared folder behind a URL: a one-dimensional array of which slices are read.

    Args:
        folder: the prepared folder.
        name: the file of the tokens in it.
        described: from the index: the `bytes` of the file, where the tokens `begin` in it, their number, their dtype.
        block_bytes: size of a block; the last one of a file is shorter.
        first_block: the number of the first block of the file; blocks are counted through all files of the folder.
        digests: a .npy file on this machine, uint64: the digest of each block.
        cache: the file of the cache, which exists.
    """

    def __init__(
        self,
        folder: RemoteFolder,
        name: str,
        described: Mapping[str, Any],
        block_bytes: int,
        first_block: int,
        digests: Path,
        cache: Path,
    ) -> None:
        self.folder, self.name, self.block_bytes, self.cache = folder, name, block_bytes, cache
        self.size, self.begin, self.count = (described[key] for key in ("bytes", "begin", "tokens"))
        self.dtype, self.first_block, self.digests = np.dtype(described["dtype"]), first_block, read_array(digests)
        self.slots = cache.stat().st_size // block_bytes
        self._process = 0  # threads and open files belong to one process
        self._pool: ThreadPoolExecutor
        self._file: int
        self._begun: OrderedDict[int, Future[bytes]]  # blocks of the file, by their last use
        self._keep = MEMORY_BYTES // block_bytes  # how many of them stay in memory

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, span: slice) -> NDArray[np.integer]:
        """The tokens of a slice without a step.

        Raises:
            UserError: they cannot be read, or have changed.
        """
        start, stop, _ = span.indices(self.count)
        if start >= stop:
            return np.empty(0, self.dtype)
        first, last = self._blocks(start, stop - start)
        content = b"".join([self._begin([block])[block].result() for block in range(first, last + 1)])
        before = self.begin + start * self.dtype.itemsize - first * self.block_bytes
        return np.frombuffer(content, self.dtype, stop - start, before)

    def prefetch(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Begin to read spans of tokens, which a later read waits for; they all stay in memory until then."""
        firsts, lasts = self._blocks(starts, sizes)
        blocks = [*dict.fromkeys(ranges(firsts, lasts - firsts + 1).tolist())]  # each once, in order
        self._keep = max(self._keep, 3 * len(blocks))  # those of two large micro-batches and of some samples ahead
        self._begin(blocks)

    def _blocks(self, starts: Any, sizes: Any) -> tuple[Any, Any]:
        """The first and the last block of spans of tokens."""
        width, size = self.dtype.itemsize, self.block_bytes
        return (self.begin + starts * width) // size, (self.begin + (starts + sizes) * width - 1) // size

    def _begin(self, blocks: Sequence[int]) -> Mapping[int, Future[bytes]]:
        """Begin to read blocks that are not in memory; the contents of these, and of others."""
        if self._process != os.getpid():
            self._pool = ThreadPoolExecutor(THREADS, "blocks")
            self._file = os.open(self.cache, os.O_RDWR | os.O_CLOEXEC)
            self._begun = OrderedDict()
            self._process = os.getpid()
        for block in blocks:
            if block in self._begun:
                self._begun.move_to_end(block)
            else:
                self._begun[block] = self._pool.submit(self._load, block)
        while len(self._begun) > max(self._keep, 1):
            self._begun.popitem(last=False)[1].cancel()  # the one that was asked for first
        return self._begun

    def _load(self, block: int) -> bytes:
        """A block from the cache, or else from the URL."""
        span = range(block * self.block_bytes, min((block + 1) * self.block_bytes, self.size))
        number = self.first_block + block
        expected, place = int(self.digests[number]), number % self.slots * self.block_bytes
        content = os.pread(self._file, len(span), place)
        if block_digest(content) == expected:
            return content
        content = self.folder.read(self.name, span, lambda content: block_digest(content) == expected)
        os.pwrite(self._file, content, place)
        return content
