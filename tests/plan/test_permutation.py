"""The order of an epoch: a permutation for any number of samples, at any positions, that looks random.

The tests of randomness have fixed seeds and bounds of about four standard deviations.
"""

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.plan.draws import permutation


def test_golden_values():
    """The order of every run depends on them. Whoever changes them increases `draws.VERSION`."""
    assert permutation(0, 0, 10).tolist() == [2, 0, 1, 3, 5, 7, 4, 6, 8, 9]
    assert permutation(0, 1, 10).tolist() == [9, 2, 8, 0, 4, 3, 7, 5, 1, 6]
    assert permutation(0, 0, 9).tolist() == [2, 0, 1, 3, 5, 7, 4, 6, 8]
    assert permutation(2**63 - 1, 5, 10**9, 10**9 - 3).tolist() == [95495238, 689464701, 781596930]
    assert permutation(1, 0, 2**61, 5, 7).tolist() == [1642404463176997460, 1643575403374501319]


def test_every_number_of_samples_up_to_3000_has_a_permutation():
    for num_samples in range(1, 3001):
        assert np.array_equal(np.sort(permutation(3, 1, num_samples)), np.arange(num_samples)), num_samples


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300_000), st.integers(0, 2**63 - 1), st.integers(0, 1000))
@example(2**16, 0, 0)
@example(2**16 + 1, 0, 0)
@example(317**2, 0, 0)
def test_larger_ones_have_a_permutation(num_samples, seed, epoch):
    assert np.array_equal(np.sort(permutation(seed, epoch, num_samples)), np.arange(num_samples))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_part_can_be_asked_for_alone(data):
    num_samples = data.draw(st.integers(1, 3000) | st.integers(1, 2**62 - 1))
    start = data.draw(st.integers(0, num_samples))
    middle, end = sorted(data.draw(st.integers(start, min(start + 500, num_samples))) for _ in range(2))
    part = permutation(7, 2, num_samples, start, end)
    assert part.dtype == np.int64
    assert part.tolist() == [
        *permutation(7, 2, num_samples, start, middle).tolist(),
        *permutation(7, 2, num_samples, middle, end).tolist(),
    ]
    assert len({*part.tolist()}) == end - start
    assert all(0 <= sample < num_samples for sample in part.tolist())


@pytest.mark.parametrize("num_samples", [2, 3, 4])
def test_each_order_of_few_samples_is_about_as_frequent(num_samples):
    seeds, orders = 1200, math.factorial(num_samples)
    found = Counter(tuple(permutation(seed, 0, num_samples).tolist()) for seed in range(seeds))
    chi_square = sum((count - seeds / orders) ** 2 / (seeds / orders) for count in found.values())
    assert len(found) == orders
    assert chi_square < orders - 1 + 4 * math.sqrt(2 * orders)


@pytest.mark.parametrize("num_samples", [1000, 100_000])
def test_neighbours_have_nothing_to_do_with_each_other(num_samples):
    width = math.isqrt(num_samples - 1) + 1
    width += width % 2  # of the network
    pairs = num_samples - 1
    for epoch in range(3):
        permuted = permutation(11, epoch, num_samples)
        for lag in (1, 2, width):
            apart = permuted[lag:] - permuted[:-lag]
            assert abs(np.corrcoef(permuted[lag:], permuted[:-lag])[0, 1]) < 4 / math.sqrt(pairs)
            assert abs((apart > 0).sum() - len(apart) / 2) < 4 * math.sqrt(num_samples / 4)
            for close, share in ((abs(apart) <= 50, 100 / num_samples), (apart % width == 0, 1 / width)):
                expected = len(apart) * share
                assert abs(close.sum() - expected) < 4 * math.sqrt(expected) + 5


def test_epochs_and_seeds_are_independent():
    num_samples, many = 5000, 100
    for orders in (
        [permutation(3, epoch, num_samples) for epoch in range(many)],
        [permutation(seed, 3, num_samples) for seed in range(many)],
    ):
        same_place = [int((one == other).sum()) for one, other in pairwise(orders)]
        assert abs(np.mean(same_place) - 1) < 4 / math.sqrt(many)  # Poisson
        correlations = [np.corrcoef(one, other)[0, 1] for one, other in pairwise(orders)]
        assert np.abs(correlations).max() < 4.5 / math.sqrt(num_samples)
        assert abs(np.mean(correlations)) < 4 / math.sqrt(num_samples * many)


@pytest.mark.parametrize("start", [0, 10**9 // 2, 10**9 - 20_000])
def test_a_part_of_a_long_order_is_spread_evenly(start):
    num_samples = 10**9
    part = permutation(0, 0, num_samples, start, start + 20_000)
    counts = np.bincount(part // 10**7, minlength=100)
    assert abs(((counts - 200) ** 2 / 200).sum() - 99) < 4 * math.sqrt(2 * 99)
    assert abs(np.corrcoef(part[1:], part[:-1])[0, 1]) < 4 / math.sqrt(20_000)
    gaps = np.diff(np.sort(part)) / (num_samples / 20_000)  # exponential, if the part is a random subset
    assert abs(gaps.mean() - 1) < 0.01
    assert abs((gaps**2).mean() - 2) < 4 * math.sqrt(20 / 20_000)
