"""The tokens of a prepared corpus behind a URL: read in blocks, ahead of the step that needs them, through a cache.

The files of tokens are cut into blocks of equal size, and a block is one request. The index has a digest of each block.

The cache is a file of a fixed size, which the processes of a machine share. Block b belongs into slot b modulo the
number of slots. Whatever a process reads from a slot is compared with the digest of the block. Therefore the cache has
neither a list of its blocks nor a lock: if the slot is empty, damaged, half-written or has another block, the digest
differs, and the block is read from the URL. To replace the least recently used block would be no better, because
samples are read in random order.
"""

import bisect
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from shared.cache.prepared import read_array
from shared.disk import NO_SPACE, remedy
from shared.errors import UserError
from shared.remote.object_store import RemoteFolder

THREADS = 32  # requests of a process at once: at 50 ms each, 640 blocks per second
SAMPLES_AHEAD = 512  # how many samples a process begins to read before the one that is needed
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
    before = file.stat().st_size if file.exists() else None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if (before or 0) > size:
                os.ftruncate(descriptor, size)
            os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        if before is None:
            file.unlink(missing_ok=True)
        elif before < size:
            os.truncate(file, before)
        raise UserError(
            f"{flag}: {file.parent} has no room for {size / 1e9:,.3g} GB ({error.strerror or error}): lower it, "
            f"{remedy(error)}, or set ACCELERATE_RECIPES_CACHE to another folder"
        ) from None


class RemoteBlocks:
    """The blocks of a prepared folder behind a URL.

    Args:
        folder: the prepared folder.
        files: the path and the size in bytes of each file; blocks are counted through all of them.
        block_bytes: size of a block; the last one of a file is shorter.
        digests: a .npy file on this machine, uint64: the digest of each block.
        cache: the file of the cache, which exists.
    """

    def __init__(
        self, folder: RemoteFolder, files: Sequence[tuple[str, int]], block_bytes: int, digests: Path, cache: Path
    ) -> None:
        self.arguments = (folder, files, block_bytes, digests, cache)
        self.folder, self.files, self.block_bytes, self.cache = folder, files, block_bytes, cache
        self.digests = read_array(digests)
        self.first_blocks = np.cumsum([0, *(-(-size // block_bytes) for _, size in files)]).tolist()  # of each file
        assert len(self.digests) == self.first_blocks[-1]
        self.slots = cache.stat().st_size // block_bytes
        self._process = 0  # threads and open files belong to one process
        self._pool: ThreadPoolExecutor
        self._file: int
        self._begun: OrderedDict[int, Future[bytes]]
        self._keep = 0  # blocks

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return type(self), self.arguments

    def prefetch(self, blocks: Sequence[int]) -> None:
        """Begin to read blocks, which a later `read` of each waits for; it keeps them all in memory."""
        self._keep = max(self._keep, 3 * len(blocks))  # those of two large micro-batches and of some samples ahead
        self._begin(blocks)

    def read(self, block: int) -> bytes:
        """The content of a block.

        Raises:
            UserError: it cannot be read, or its content has changed.
        """
        self._begin([block])
        return self._begun[block].result()

    def _begin(self, blocks: Sequence[int]) -> None:
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
        while len(self._begun) > max(MEMORY_BYTES // self.block_bytes, self._keep):
            self._begun.popitem(last=False)[1].cancel()  # the one that was asked for first

    def _load(self, block: int) -> bytes:
        """A block from the cache, or else from the URL."""
        file = bisect.bisect_right(self.first_blocks, block) - 1
        name, size = self.files[file]
        start = (block - self.first_blocks[file]) * self.block_bytes
        span = range(start, min(start + self.block_bytes, size))
        expected, place = int(self.digests[block]), block % self.slots * self.block_bytes
        content = os.pread(self._file, len(span), place)
        if block_digest(content) == expected:
            return content
        content = self.folder.read(name, span, lambda content: block_digest(content) == expected)
        try:
            os.pwrite(self._file, content, place)
        except OSError as error:  # on a file system that writes changed blocks to another place
            if error.errno not in NO_SPACE:
                raise
            raise UserError(f"{self.cache} cannot be written ({error.strerror}): {remedy(error)}") from None
        return content


class RemoteTokens:
    """The tokens of one corpus of a prepared folder behind a URL: a one-dimensional array of which slices are read.

    Args:
        blocks: of the folder.
        file: the number of the corpus's file in the list of files.
        begin: where the tokens begin in the file, in bytes.
        count: the number of tokens.
        dtype: of a token.
    """

    samples_ahead = SAMPLES_AHEAD

    def __init__(self, blocks: RemoteBlocks, file: int, begin: int, count: int, dtype: Any) -> None:
        self.blocks, self.begin, self.count, self.dtype = blocks, begin, count, np.dtype(dtype)
        self.first_block = blocks.first_blocks[file]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, span: slice) -> NDArray[np.integer]:
        """The tokens of a slice without a step."""
        start, stop, _ = span.indices(self.count)
        if start >= stop:
            return np.empty(0, self.dtype)
        first, last = self._blocks(start, stop - start)
        content = b"".join([self.blocks.read(self.first_block + block) for block in range(first, last + 1)])
        before = self.begin + start * self.dtype.itemsize - first * self.blocks.block_bytes
        return np.frombuffer(content, self.dtype, stop - start, before)

    def prefetch(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
        """Begin to read spans of tokens."""
        firsts, lasts = self._blocks(starts, sizes)
        spans = lasts - firsts + 1
        inside = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
        found = self.first_block + np.repeat(firsts, spans) + inside
        self.blocks.prefetch([*dict.fromkeys(found.tolist())])  # each once, in order

    def _blocks(self, starts: Any, sizes: Any) -> tuple[Any, Any]:
        """The first and the last block of spans of tokens, counted from the beginning of the file."""
        width, size = self.dtype.itemsize, self.blocks.block_bytes
        return (self.begin + starts * width) // size, (self.begin + (starts + sizes) * width - 1) // size
