"""A plan copies nothing of the size of the data: its cost is that of a global batch, for any number of processes."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.datasets import splits
from shared.datasets.splits import share_of_each
from shared.errors import UserError
from shared.plan import batches
from shared.plan.batches import Plan
from shared.plan.draws import hash64

BILLION = 10**9


def mapped(folder, count):
    """A sparse file of `count` lengths, which takes no space on disk."""
    path = folder / "lengths"
    with path.open("wb") as file:
        file.truncate(4 * count)
    return np.memmap(path, np.int32, "r").view(np.ndarray)


def test_a_plan_takes_the_memory_of_a_step(tmp_path):
    lengths = mapped(tmp_path, BILLION // 10)  # in the time of a test; benchmarks/scale.py reads a billion
    sizes = {"global_batch_size": 4096, "num_epochs": 2, "max_tokens": 16_384, "num_processes": 2}
    tracemalloc.start()
    try:
        plan = Plan(lengths=lengths, weights=lengths, padded=lambda lengths: lengths + 20, longest=0, seed=0, **sizes)
        steps = [0, plan.total_steps // 2, plan.total_steps - 1]
        samples = [m.samples for step in steps for m in plan.micro_batches(step)]
        no_lengths = Plan(num_samples=BILLION, seed=0, global_batch_size=64, num_epochs=1).micro_batches(7)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert sum(map(len, samples)) > 4096
    assert sum(len(m.samples) for m in no_lengths) == 64


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=60), st.sampled_from([np.int32, np.uint16, np.int64]))
def test_lengths_of_any_kind_give_the_same_plan(lengths, kind):
    """Padded by the plan, from the smallest type and with a known longest sample, or all that in advance."""
    wide = np.array(lengths)
    settings_ = {"seed": 5, "global_batch_size": 7, "num_epochs": 1, "max_tokens": 600}
    later = {"padded": lambda lengths: lengths + lengths % 2, "longest": int(wide.argmax())}
    first, other = [
        [(m.index, m.samples.tolist()) for step in range(plan.total_steps) for m in plan.micro_batches(step)]
        for plan in (Plan(lengths=wide + wide % 2, **settings_), Plan(lengths=wide.astype(kind), **later, **settings_))
    ]
    assert first == other


def test_a_known_longest_sample_is_checked_against_the_budget_and_none_is_searched_for():
    class NotSearched(np.ndarray):
        def argmax(self, *_):
            raise AssertionError

    lengths = np.array([10, 60, 5]).view(NotSearched)
    sizes = {"seed": 0, "global_batch_size": 2, "num_epochs": 1}
    with pytest.raises(UserError, match="which has 64 tokens: raise it to 64 or more"):
        Plan(lengths=lengths, longest=1, padded=lambda lengths: lengths + 4, **sizes, max_tokens=63)
    Plan(lengths=lengths, **sizes)


@pytest.mark.parametrize("equal_counts", [False, True])
def test_an_evaluation_in_blocks_has_each_sample_once_and_equal_counts_where_required(monkeypatch, equal_counts):
    lengths = np.random.default_rng(0).integers(1, 90, 1000)
    sizes = {"global_batch_size": 30, "num_epochs": 1, "max_tokens": 100, "num_processes": 3}

    def passes():
        plans = [
            Plan(lengths=lengths, seed=0, **sizes, process_index=rank, equal_counts=equal_counts) for rank in range(3)
        ]
        return [[*plan.evaluation(lengths, lambda block: block + 10)] for plan in plans]

    whole = passes()
    alone = batches.evaluation_batches(
        lengths + 10, 200, None, num_processes=3, process_index=1, equal_counts=equal_counts
    )
    assert [m.samples.tolist() for m in whole[1]] == [m.samples.tolist() for m in alone]
    monkeypatch.setattr(batches, "BLOCK", 128)
    in_blocks = passes()
    samples = np.concatenate([m.samples for mine in in_blocks for m in mine if m.counted])
    assert sorted(samples) == list(range(1000))
    assert all((lengths[m.samples].max() + 10) * len(m.samples) <= 200 for mine in in_blocks for m in mine)
    assert not equal_counts or len({*map(len, in_blocks)}) == 1


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans(), st.integers(1, 99), st.integers(0, 5))
def test_a_share_of_each_label_is_chosen_part_by_part(data, several, percentage, seed):
    """Sorted at once: the places at which the rounded share grows."""
    count = data.draw(st.integers(1, 80))
    labels = st.lists(st.integers(0, 1), min_size=3, max_size=3) if several else st.integers(0, 4)
    targets = np.array(data.draw(st.lists(labels, min_size=count, max_size=count)))
    groups = targets @ [4, 2, 1] if several else targets  # the order of the combinations is that of their bits
    places, expected = np.arange(count), np.zeros(count, bool)
    order = np.argsort(hash64(seed, np.arange(count, dtype=np.uint64)), kind="stable")
    expected[order[np.argsort(groups[order], kind="stable")]] = (
        places + 1
    ) * percentage // 100 > places * percentage // 100
    has = targets.astype(bool) if several else targets[:, None] == np.arange(5)
    for label in range(has.shape[1]):
        rows = np.flatnonzero(has[:, label])
        if expected[rows].all() and len(rows):
            expected[rows[0]] = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(splits, "BLOCK", 7)
        patch.setattr(splits, "SORTED", 16)
        assert share_of_each(targets, percentage, seed).tolist() == expected.tolist()


def test_rows_are_chosen_and_held_out_without_memory_for_each_of_them(tmp_path, monkeypatch):
    count = 1 << 20
    monkeypatch.setattr(splits, "BLOCK", 1 << 14)
    monkeypatch.setattr(splits, "SORTED", 1 << 16)
    targets = np.memmap(tmp_path / "targets", np.int64, "w+", shape=(count,))
    targets[::3] = 1
    held_out = np.memmap(tmp_path / "held_out", np.bool_, "w+", shape=(count,))
    tracemalloc.start()
    try:
        share_of_each(targets, 10, 0, held_out)
        splits.hash_limit(count, count // 10, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 << 20, "one int64 for each row takes 8 MiB"
    assert held_out.sum() == pytest.approx(count / 10, abs=2)
