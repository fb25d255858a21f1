"""A plan has each sample once per epoch, keeps the budget, follows from the config, and does not copy the data."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from large_data import traced

from shared.augmentation.augmentation import RepeatingPlan
from shared.errors import UserError
from shared.plan.batches import Plan
from shared.plan.cutting import Budget, cut_points
from shared.plan.draws import hash64, permutation


@st.composite
def plans(draw):
    """Valid arguments: lengths of 1-10,000, 1-9 processes, a global batch of at least one sample per process."""
    lengths = np.array(draw(st.lists(st.integers(1, 10_000), min_size=1, max_size=120)))
    processes = draw(st.integers(1, 9))
    return {
        "lengths": lengths,
        "seed": draw(st.integers(0, 2**31)),
        "global_batch_size": draw(st.integers(processes, 90)),
        "num_epochs": draw(st.integers(1, 3)),
        "max_tokens": draw(st.none() | st.integers(int(lengths.max()), 3 * int(lengths.max()))),
        "max_samples": draw(st.none() | st.integers(1, 20)),
        "micro_batches_per_step": draw(st.integers(1, 12)),
        "num_processes": processes,
        "equal_counts": draw(st.booleans()),
        "packed": draw(st.booleans()),
        "weights": draw(st.none() | st.just(1 + lengths // 3) | st.just(0.1 + lengths / 3)),
    }


def size_of(lengths, packed):
    """Tokens that a micro-batch takes."""
    return int(lengths.sum()) if packed else len(lengths) * int(lengths.max())


def shares(plan, step):
    return plan.micro_batches_of_all(step)


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 50))
def test_all_processes_together_have_every_sample_exactly_once_per_epoch_and_each_computes_any_step(arguments, one):
    plan, rank = Plan(**arguments), arguments["num_processes"] - 1
    seen, steps = Counter(), []
    for step in range(plan.total_steps):
        steps.append(shares(plan, step))
        for micro_batch in (m for mine in steps[-1] for m in mine if m.counted):
            seen.update(zip(micro_batch.epochs.tolist(), micro_batch.samples.tolist(), strict=True))
    one %= plan.total_steps
    arguments["lengths"] = arguments["lengths"].tolist()
    direct = Plan(**arguments, process_index=rank).micro_batches(one)
    parts = [
        [(m.index, m.samples.tolist(), m.epochs.tolist(), m.last) for m in found]
        for found in (direct, steps[one][rank])
    ]
    assert parts[0] == parts[1]
    epochs, n = arguments["num_epochs"], len(arguments["lengths"])
    assert seen == Counter({(epoch, sample): 1 for epoch in range(epochs) for sample in range(n)})


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 10_000))
def test_every_step_keeps_the_budgets_and_has_one_normalizer(arguments, step):
    plan = Plan(**arguments)
    step %= plan.total_steps
    everyone = shares(plan, step)
    samples, _ = plan.global_batch(step)
    size = len(samples)
    normalizer = size if arguments["weights"] is None else arguments["weights"][samples].sum()
    assert size == arguments["global_batch_size"] or step == plan.total_steps - 1
    for mine in everyone:
        assert mine, "a process without a micro-batch would miss the synchronization"
        assert [m.last for m in mine] == [False] * (len(mine) - 1) + [True]
        for m in mine:
            lengths = arguments["lengths"][m.samples]
            assert size_of(lengths, arguments["packed"]) <= (arguments["max_tokens"] or np.inf)
            assert len(m.samples) <= (arguments["max_samples"] or np.inf)
            assert m.step_size == pytest.approx(normalizer, rel=1e-12)
    assert len({m.step_size for mine in everyone for m in mine}) == 1
    if arguments["equal_counts"]:
        assert len({len(mine) for mine in everyone}) == 1
    elif size == plan.global_batch_size:
        assert all(m.counted for mine in everyone for m in mine)


NINE_ROWS_IN_PAIRS = {"lengths": np.ones(9, int), "seed": 0, "global_batch_size": 9, "num_epochs": 1, "max_samples": 2}


@settings(max_examples=150, deadline=None)
@given(plans(), st.integers(0, 10_000))
@example(NINE_ROWS_IN_PAIRS | {"num_processes": 5}, 0)  # 5 pieces would fit, but the cut has 8, also on 5 processes
def test_the_cut_does_not_depend_on_the_number_of_processes(arguments, step):
    many = Plan(**arguments | {"equal_counts": False})
    alone = Plan(**arguments | {"equal_counts": False, "num_processes": 1})
    step %= many.total_steps
    of_many = sorted((m for mine in shares(many, step) for m in mine if m.counted), key=lambda m: m.index)
    if len(many.cut(step)) == len(alone.cut(step)):
        assert [(m.index, m.samples.tolist()) for m in of_many] == [
            (m.index, m.samples.tolist()) for m in alone.micro_batches(step)
        ]
    else:
        assert len(alone.cut(step)) < many.num_processes
    together = np.sort(np.concatenate([m.samples for m in of_many]))
    assert together.tolist() == sorted(alone.global_batch(step)[0].tolist())


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("processes", [2, 3, 8])
def test_the_last_step_with_fewer_samples_has_one_cut_on_any_number_of_processes(processes, equal_counts):
    config = {"num_samples": 1497, "seed": 0, "global_batch_size": 128, "num_epochs": 3, "max_samples": 16}
    alone, many = Plan(**config), Plan(**config, num_processes=processes, equal_counts=equal_counts)
    last = alone.total_steps - 1
    assert [len(piece.samples) for piece in alone.cut(last)] == [11]
    assert [len(piece.samples) for piece in many.cut(last)] == [11]
    assert not many.cut_otherwise(last, 1, 1)
    assert [len(mine) for mine in shares(many, last)] == [1] * processes
    repeats = [m for mine in shares(many, last) for m in mine if not m.counted]
    assert [len(m.samples) for m in repeats] == [2] * (processes - 1), "batch norm does not accept one row"


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(1, 9), st.integers(0, 10_000))
def test_a_run_that_goes_on_with_fewer_processes_keeps_its_micro_batches(arguments, fewer, step):
    first = Plan(**arguments | {"equal_counts": False})
    later = Plan(**arguments | {"equal_counts": False, "num_processes": min(fewer, first.num_processes)})
    later.first_processes = first.num_processes
    step %= first.total_steps
    assert [m.samples.tolist() for m in later.cut(step)] == [m.samples.tolist() for m in first.cut(step)]
    assert not later.cut_otherwise(0, first.num_processes, first.num_processes)


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(1, 9), st.booleans())
def test_a_plan_knows_whether_another_number_of_processes_cuts_a_step_otherwise(arguments, others, without_lengths):
    if without_lengths:
        arguments |= {"num_samples": len(arguments["lengths"]), "lengths": None, "max_tokens": None, "weights": None}
    here = Plan(**arguments)
    elsewhere = Plan(**arguments | {"num_processes": others}) if arguments["global_batch_size"] >= others else here
    differing = [len(here.cut(step)) != len(elsewhere.cut(step)) for step in range(here.total_steps)]
    assert here.cut_otherwise(0, elsewhere.num_processes, 1) == any(differing)
    assert here.cut_otherwise(1, elsewhere.num_processes, 1) == any(differing[1:])


def test_of_a_billion_samples_only_some_lengths_are_read_to_compare_the_steps():
    """Each step has enough micro-batches for two processes."""

    class Lengths(np.ndarray):
        read = 0

        def __getitem__(self, samples):
            Lengths.read += len(samples)
            return np.full(len(samples), 100)

    sizes = {"max_tokens": 3200, "longest": 0, "num_processes": 2}
    plan = Plan(lengths=np.broadcast_to(100, 10**9).view(Lengths), seed=0, global_batch_size=64, num_epochs=1, **sizes)
    assert not plan.cut_otherwise(0, 1, 1)
    assert Lengths.read < 17_000


@given(
    st.lists(st.integers(0, 5_000), min_size=1, max_size=100),
    st.integers(1, 3_000),
    st.none() | st.integers(1, 30),
    st.integers(1, 40),
    st.booleans(),
)
@example([7] * 10, 1, None, 4, False)
@settings(max_examples=300, deadline=None)
def test_cut_points_cover_all_rows_under_both_budgets(lengths, slack, max_samples, at_least, packed):
    lengths.sort(reverse=True)
    max_tokens = lengths[0] + slack
    starts = cut_points(lengths, budget := Budget(max_tokens, max_samples, packed), budget.count(lengths, at_least))
    ends = [*starts[1:], len(lengths)]
    assert starts[0] == 0
    assert all(start < end for start, end in zip(starts, ends, strict=True))
    assert all(size_of(np.array(lengths[s:e]), packed) <= max_tokens for s, e in zip(starts, ends, strict=True))
    assert max_samples is None or all(e - s <= max_samples for s, e in zip(starts, ends, strict=True))
    count = len(starts)
    assert count in (at_least, len(lengths), 1, 2, 4, 8) or count % 8 == 0


@given(st.lists(st.integers(1, 512), min_size=2, max_size=128), st.integers(1, 16))
@settings(max_examples=100, deadline=None)
def test_moving_a_boundary_does_not_reduce_the_padding_without_enlarging_the_largest_piece(lengths, count):
    lengths.sort(reverse=True)
    starts = cut_points(lengths, Budget(), min(count, len(lengths)))
    sizes = [lengths[s] * (e - s) for s, e in zip(starts, [*starts[1:], len(lengths)], strict=True)]
    for piece in range(1, len(starts)):  # moving any one boundary
        before, end = starts[piece - 1], [*starts, len(lengths)][piece + 1]
        for moved in range(before + 1, end):
            pair = (lengths[before] * (moved - before), lengths[moved] * (end - moved))
            assert max(pair) > max(sizes) or sum(pair) >= sizes[piece - 1] + sizes[piece]


def test_equal_lengths_are_cut_evenly():
    assert cut_points([5] * 10, Budget(20), 4) == [0, 2, 5, 7]


def test_idle_time_of_two_processes_is_small():
    lengths = np.clip(np.random.default_rng(0).lognormal(3.7, 0.7, 4000), 4, 512).astype(int)
    plan = Plan(lengths=lengths, seed=0, global_batch_size=256, num_epochs=2, max_tokens=4096, num_processes=2)
    idle = []
    for step in range(plan.total_steps - 1):
        loads = [sum(len(m.samples) * lengths[m.samples[0]] for m in mine) for mine in shares(plan, step)]
        idle.append(1 - np.mean(loads) / max(loads))
    assert np.mean(idle) < 0.03


@settings(max_examples=100, deadline=None)
@given(plans(), st.integers(0, 20))
def test_an_evaluation_counts_every_sample_once(arguments, padding):
    lengths, budget = arguments["lengths"], arguments["max_tokens"] and arguments["max_tokens"] + padding
    arguments |= {"max_tokens": budget}
    plans_ = [Plan(**arguments, process_index=rank) for rank in range(arguments["num_processes"])]
    everyone = [plan.evaluation(lengths, lambda part: part + padding) for plan in plans_]
    counted = [m.samples for mine in everyone for m in mine if m.counted]
    assert sorted(np.concatenate(counted).tolist()) == list(range(len(lengths)))
    assert all(size_of(lengths[ids] + padding, arguments["packed"]) <= 2 * (budget or np.inf) for ids in counted)
    assert not arguments["equal_counts"] or len({*map(len, everyone)}) == 1


def test_packed_micro_batches_are_full_and_even():
    lengths = np.clip(np.random.default_rng(0).lognormal(3.7, 0.7, 4000), 4, 128).astype(int)
    plan = Plan(lengths=lengths, seed=0, global_batch_size=256, num_epochs=2, max_tokens=2048, packed=True)
    for step in range(plan.total_steps - 1):
        sizes = [int(lengths[m.samples].sum()) for m in plan.cut(step)]
        assert max(sizes) <= 2048
        assert min(sizes) > 0.85 * max(sizes)


def test_golden_values_of_the_hash():
    """The order of every run ever made depends on these: they must never change."""
    assert hash64(0) == 0x6E789E6AA1B965F4  # the second output of splitmix64 from seed 0, as published
    assert hash64(1, 2, 3) == 0x48CF5028B6DF10DB
    assert hash64(1, 2, np.arange(3, 5, dtype=np.uint64)).tolist() == [hash64(1, 2, 3), hash64(1, 2, 4)]


def test_epochs_are_completed_by_the_step_that_reaches_their_end():
    plan = Plan(num_samples=10, seed=0, global_batch_size=4, num_epochs=2)
    assert plan.total_steps == 5
    assert [plan.due(None, step) for step in range(5)] == [False, False, True, False, True]
    assert [plan.due(3, step) for step in range(5)] == [False, False, True, False, True]
    samples, epochs = plan.global_batch(2)
    assert epochs.tolist() == [0, 0, 1, 1]
    assert samples.tolist() == [*permutation(0, 0, 10)[8:], *permutation(0, 1, 10)[:2]]


def test_max_steps_may_exceed_an_epoch_and_every_batch_is_full():
    plan = Plan(num_samples=5, seed=0, global_batch_size=12, max_steps=3)
    assert [len(plan.global_batch(step)[0]) for step in range(3)] == [12, 12, 12]
    assert set(plan.global_batch(0)[1].tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("settings_", "expected"),
    [
        ({"lengths": np.array([10, 60, 5]), "max_tokens": 50}, "micro_batch 50 .* sample 1, which has 60 tokens"),
        ({"num_samples": 10, "num_processes": 3}, "--global_batch_size 2 is smaller than the number of processes, 3"),
        ({"num_samples": 10, "max_tokens": 8}, "--max_tokens_per_micro_batch 8 needs the lengths"),
    ],
)
def test_settings_without_a_plan_are_refused(settings_, expected):
    with pytest.raises(UserError, match=expected):
        Plan(**settings_, seed=0, global_batch_size=2, num_epochs=1)


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
    with traced() as memory:
        plan = Plan(lengths=lengths, weights=lengths, padded=lambda lengths: lengths + 20, longest=0, seed=0, **sizes)
        steps = [0, plan.total_steps // 2, plan.total_steps - 1]
        samples = [m.samples for step in steps for m in plan.micro_batches(step)]
        no_lengths = Plan(num_samples=BILLION, seed=0, global_batch_size=64, num_epochs=1).micro_batches(7)
    assert memory.peak < 16 << 20
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


@given(*(st.integers(1, most) for most in (5, 40, 30, 3, 8, 99)))
def test_every_pass_has_each_sample_in_each_of_its_epochs_once(repeats, count, batch, passes, rows, seed):
    settings = {"num_samples": count, "global_batch_size": batch, "num_epochs": passes * repeats, "seed": seed}
    plan = RepeatingPlan(max_samples=rows, repeats=repeats, **settings)
    fed = Counter()
    for step in range(plan.total_steps):
        samples, epochs = plan.global_batch(step)
        fed.update(zip(samples.tolist(), epochs.tolist(), strict=True))
        fed_by_pieces = sum(len(piece.samples) for piece in plan.micro_batches(step))
        assert fed_by_pieces == len(samples) == min(batch, plan.total_samples - step * batch)
        if repeats == 1:
            assert (np.diff(epochs) >= 0).all()
            whole = {epoch: permutation(seed, epoch, count) for epoch in sorted(set(epochs.tolist()))}
            parts = [part for epoch, order in whole.items() for part in order]
            assert samples.tolist() == parts[step * batch - epochs[0] * count :][: len(samples)]
    assert fed == Counter((sample, epoch) for sample in range(count) for epoch in range(passes * repeats))


def test_the_copies_of_an_image_are_in_one_step_and_in_different_micro_batches():
    plan = RepeatingPlan(seed=0, num_epochs=8, num_samples=100, global_batch_size=32, max_samples=8, repeats=4)
    for piece in plan.cut(1):
        assert len(set(piece.samples.tolist())) == 8
    samples, epochs = plan.global_batch(1)
    assert set(Counter(samples.tolist()).values()) == {4}
    assert len(set(zip(samples.tolist(), epochs.tolist(), strict=True))) == 32
