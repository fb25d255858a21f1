"""The tokens of a prepared corpus behind a URL: read in blocks, ahead of the step that needs them, through a cache.

The shards are cut into blocks of equal size, and a block is one request. The index has a digest of each block.

The cache is a file of a fixed size, which the processes of a machine share. Block b belongs into slot b modulo the
number of slots. Whatever a process reads from a slot is compared with the digest of the block. Therefore the cache has
neither a list of its blocks nor a lock: if the slot is empty, damaged, half-written or has another block, the digest
differs, and the block is read from the URL. To replace the least recently used block would be no better, because
samples are read in random order.
"""

import bisect
import errno
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import UserError
from shared.text.object_store import RemoteFolder
from shared.text.token_files import Ints, Tokens, mapped

THREADS = 32  # requests of a process at once: at 50 ms each, 640 blocks per second
SAMPLES_AHEAD = 512  # how many samples a process begins to read before the one that is needed
MEMORY_BYTES = 1 << 26  # of blocks that a process keeps: about twice those of the samples ahead


def hashes() -> Any:
    """The package xxhash. Its XXH3 detects damage and no forgery.

    Raises:
        UserError: it is not installed.
    """
    try:
        import xxhash
    except ImportError:
        raise UserError("prepared data need a package that is not installed: pip install xxhash") from None
    return xxhash


def block_digest(content: bytes) -> int:
    """The digest of a block."""
    return int(hashes().xxh3_64_intdigest(content))


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
            f"{flag}: {file.parent} has no room for {size / 1e9:,.3g} GB ({error.strerror or error}): lower it, free "
            "space, or set ACCELERATE_RECIPES_CACHE to another folder"
        ) from None


class RemoteBlocks:
    """The blocks of a prepared folder behind a URL.

    Args:
        folder: the prepared folder.
        shards: the path and the size in bytes of each shard; blocks are counted through all of them.
        block_bytes: size of a block; the last one of a shard is shorter.
        digests: a file on this machine, uint64: the digest of each block.
        cache: the file of the cache, which exists.
    """

    def __init__(
        self, folder: RemoteFolder, shards: Sequence[tuple[str, int]], block_bytes: int, digests: Path, cache: Path
    ) -> None:
        self.arguments = (folder, shards, block_bytes, digests, cache)
        self.folder, self.shards, self.block_bytes, self.cache = folder, shards, block_bytes, cache
        self.digests = mapped(digests, np.uint64)
        self.first_blocks = np.cumsum([0, *(-(-size // block_bytes) for _, size in shards)]).tolist()  # of each shard
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
        shard = bisect.bisect_right(self.first_blocks, block) - 1
        name, size = self.shards[shard]
        start = (block - self.first_blocks[shard]) * self.block_bytes
        span = range(start, min(start + self.block_bytes, size))
        expected, place = int(self.digests[block]), block % self.slots * self.block_bytes
        content = os.pread(self._file, len(span), place)
        if block_digest(content) == expected:
            return content
        content = self.folder.read(name, span, lambda content: block_digest(content) == expected)
        try:
            os.pwrite(self._file, content, place)
        except OSError as error:  # on a file system that writes changed blocks to another place
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"{self.cache} cannot be written ({error.strerror}): free space and start again") from None
        return content


class RemoteTokens(Tokens):
    """The tokens of one corpus of a prepared folder behind a URL.

    Args:
        blocks: of the folder.
        first_shard: of the corpus, in the folder's list of shards.
        counts: the number of tokens in each shard of the corpus.
        dtype: of a token.
    """

    samples_ahead = SAMPLES_AHEAD

    def __init__(self, blocks: RemoteBlocks, first_shard: int, counts: Sequence[int], dtype: Any) -> None:
        super().__init__([], counts, dtype)
        self.blocks, self.first_shard = blocks, first_shard
        assert blocks.block_bytes % self.dtype.itemsize == 0

    def prefetch(self, starts: Ints, sizes: Ints) -> None:
        """Begin to read spans of tokens, each within a document."""
        shards = np.searchsorted(self.ends, starts, side="right") - 1
        firsts, lasts = self._blocks(shards, starts - np.take(self.ends, shards), sizes)
        spans = lasts - firsts + 1
        inside = np.arange(spans.sum()) - np.repeat(np.cumsum(spans) - spans, spans)
        self.blocks.prefetch([*dict.fromkeys((np.repeat(firsts, spans) + inside).tolist())])  # each once, in order

    def _blocks(self, shards: Any, firsts: Any, sizes: Any) -> tuple[Any, Any]:
        """The first and the last block of spans that begin at the tokens `firsts` of shards."""
        width, size = self.dtype.itemsize, self.blocks.block_bytes
        before = np.take(self.blocks.first_blocks, shards + self.first_shard)
        return before + firsts * width // size, before + ((firsts + sizes) * width - 1) // size

    def _within(self, shard: int, first: int, end: int) -> NDArray[np.integer]:
        begin, last = map(int, self._blocks(shard, first, end - first))
        content = b"".join([self.blocks.read(block) for block in range(begin, last + 1)])
        before = (begin - self.blocks.first_blocks[shard + self.first_shard]) * self.blocks.block_bytes
        return np.frombuffer(content, self.dtype, end - first, first * self.dtype.itemsize - before)
