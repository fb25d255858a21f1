"""The numbers that a run draws from its seed: hashes, the order of the samples of an epoch, and the generators."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ints = NDArray[np.int64]

MASK64 = 0xFFFFFFFFFFFFFFFF
VERSION = 2  # of the order; increase it when a run would see its samples in another order. 1: sorted by hash
ROUNDS = 12  # the 24 orders of four samples then have probabilities within 0.1 % of each other
BLOCK = 4096  # positions that are computed together: for a few, NumPy's calls take longer than the arithmetic
CPU = torch.device("cpu")
ORDER = 1 << 63  # hash word that no sample number equals: the order is independent of the draws of samples


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


def permutation(seed: int, epoch: int, num_samples: int, start: int = 0, end: int | None = None) -> Ints:
    """The samples at the positions `start` to `end` - 1 of the order of an epoch: int64 [end - start].

    Time and memory grow with `end - start` and not with `num_samples`. The result is a function of the arguments only.
    It may be read-only.

    Args:
        seed: of the run.
        epoch: from 0.
        num_samples: of the data set, at least 1 and below 2**62.
        start, end: a range of positions in 0 to `num_samples`; None: up to the last.
    """
    end = num_samples if end is None else end
    blocks = range(start // BLOCK, -(-end // BLOCK))
    parts = [_block(seed, epoch, num_samples, i)[max(start - i * BLOCK, 0) : end - i * BLOCK] for i in blocks]
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])


@lru_cache(maxsize=4)  # steps share blocks, and a global batch may contain samples of several epochs
def _block(seed: int, epoch: int, num_samples: int, index: int) -> Ints:
    """The samples at the positions `index` x BLOCK to (`index` + 1) x BLOCK - 1, or to the last one.

    A sample number is written as left + width x right. Each round adds a hash of one half to the other half, modulo
    the size of that half, so it can be undone: a Feistel network. Numbers beyond the last sample go through the network
    again (cycle walking); there are fewer than 2 + sqrt(num_samples) of them. Source: Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", CT-RSA 2002, method 3. The width is even here. With an odd width and an odd height all
    permutations would be even, which leaves out half of the orders of few samples.
    """
    width = math.isqrt(num_samples - 1) + 1
    width += width % 2
    height = -(-num_samples // width)
    key = hash64(seed, epoch, ORDER)
    keys = [hash64(round_, state=key) for round_ in range(ROUNDS)]
    positions = np.arange(index * BLOCK, min((index + 1) * BLOCK, num_samples), dtype=np.uint64)
    samples = _encipher(positions, keys, width, height)
    while len(outside := np.flatnonzero(samples >= num_samples)):
        samples[outside] = _encipher(samples[outside], keys, width, height)
    samples.flags.writeable = False
    return samples.view(np.int64)


def _encipher(numbers: NDArray[np.uint64], keys: Sequence[int], width: int, height: int) -> NDArray[np.uint64]:
    """A permutation of 0 ... width x height - 1, applied to `numbers`; each key is one round of the network."""
    left, right = numbers % width, numbers // width
    for round_, key in enumerate(keys):
        # The hash is halved, because a sum beyond 2**64 would wrap around, and the round could not be undone.
        if round_ % 2:
            right = (right + (hash64(left, state=key) >> 1)) % height
        else:
            left = (left + (hash64(right, state=key) >> 1)) % width
    return left + width * right


def seed_dropout(device: torch.device, seed: int, step: int, micro_batch: int) -> None:
    """Seed torch on the CPU and on `device` for the forward pass of one micro-batch, the same on any process."""
    _seed_torch(hash64(seed, step, micro_batch, 2), device)


def seed_sample(seed: int, epoch: int, sample: int) -> None:
    """Seed `random`, NumPy and torch on the CPU for reading one sample in one epoch."""
    _seed(hash64(seed, epoch, sample, 1))  # the last word makes these draws differ from those of dropout


def seed_micro_batch(seed: int, step: int, micro_batch: int) -> None:
    """Seed `random`, NumPy and torch on the CPU for collating one micro-batch, and for what follows it."""
    _seed(hash64(seed, step, micro_batch, 3))


def seed_update(device: torch.device, seed: int, step: int) -> None:
    """Seed torch for the update of a step: processes that drew other numbers would have other weights."""
    _seed_torch(hash64(seed, step, 4), device)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed all generators for the start of a run; afterwards they go on as before, for a search that draws settings."""
    of_random, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            _seed(hash64(seed, 5), device)
            yield
        finally:
            random.setstate(of_random)
            np.random.set_state(of_numpy)


def _seed(value: int, device: torch.device = CPU) -> None:
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    _seed_torch(value, device)


def _seed_torch(value: int, device: torch.device) -> None:
    """Seed each generator by itself, because `torch.manual_seed` queries every possible backend: 0.2 ms per call."""
    torch.default_generator.manual_seed(value >> 1)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(value >> 1)
