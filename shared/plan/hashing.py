"""The random numbers of a run: hashes of integers, the same on every version of NumPy and torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


MASK64 = 0xFFFFFFFFFFFFFFFF


def hash64(*words: Any, state: Any = 0x9E3779B97F4A7C15) -> Any:
    """Mix integers, or arrays of uint64, into one 64-bit hash each (splitmix64's finalizer, once per word).

    `state` is the hash of the preceding words: hashes with a common prefix compute it once.

    The random numbers of a run come from here, because NumPy and torch may change their streams between versions.
    Python ints and uint64 arrays, whose arithmetic wraps around, give the same values.
    """
    for word in words:
        state = ((state ^ word) + 0x9E3779B97F4A7C15) & MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK64
        state = state ^ (state >> 31)
    return state
