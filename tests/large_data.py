"""Read data twice, as small and as large data, and compress files, for tests."""

import bz2
import gzip
import lzma
import os

import pyarrow as pa
import pytest

from shared.errors import UserError

COMPRESS = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


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
