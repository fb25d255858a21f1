"""Read data twice, as small and as large data, trace the memory that this takes, and compress files, for tests."""

import bz2
import gzip
import lzma
import os
import tracemalloc
from contextlib import contextmanager
from types import SimpleNamespace

import pyarrow as pa
import pytest

from shared.errors import UserError

COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


@contextmanager
def traced():
    """What Python's objects take in this context, in bytes, once it has ended: `kept` at its end, `peak` at most."""
    memory = SimpleNamespace()
    tracemalloc.start()
    try:
        yield memory
        memory.kept, memory.peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def in_both_ways(read, large):
    """What `read` returns, or the message of its error: as usual, and with {(module, name of a constant): value}.

    Each has its own folder in the cache folder of the test.
    """
    found = []
    for patches in ({}, large):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ACCELERATE_RECIPES_CACHE", f"{os.environ['ACCELERATE_RECIPES_CACHE']}/{len(found)}")
            for (module, name), value in patches.items():
                patch.setattr(module, name, value)
            try:
                found.append(read())
            except UserError as error:
                found.append(str(error))
    assert not any("\n" in message for message in found if isinstance(message, str))
    return found
