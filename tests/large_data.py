"""Read data twice, as small and as large data, for tests."""

import os

import pytest

from shared.errors import UserError


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
