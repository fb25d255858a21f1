"""With repeated augmentation a step has each image several times, and a pass still has every sample equally often."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.augmentation.repeated import RepeatedPlan
from shared.plan.batches import Plan


def plan_of(repeats, kind=RepeatedPlan, **settings):
    plan = kind(**{"seed": 0, "num_epochs": 2 * repeats} | settings)
    plan.repeats = repeats
    return plan


@given(
    st.integers(1, 5), st.integers(1, 40), st.integers(1, 30), st.integers(1, 3), st.integers(1, 8), st.integers(0, 99)
)
def test_every_pass_has_each_sample_in_each_of_its_epochs_once(repeats, count, batch, passes, rows, seed):
    settings = {"num_samples": count, "global_batch_size": batch, "num_epochs": passes * repeats, "seed": seed}
    plan = plan_of(repeats, max_samples=rows, **settings)
    fed = Counter()
    for step in range(plan.total_steps):
        pieces = plan.micro_batches(step)
        samples, epochs = plan.global_batch(step)
        assert (
            sum(len(piece.samples) for piece in pieces) == len(samples) == min(batch, plan.total_samples - step * batch)
        )
        fed.update(zip(samples.tolist(), epochs.tolist(), strict=True))
    assert fed == Counter((sample, epoch) for sample in range(count) for epoch in range(passes * repeats))


def test_without_repeats_it_is_the_plan():
    settings = {"num_samples": 23, "global_batch_size": 10, "num_epochs": 3}
    for step in range(7):
        found, expected = (plan_of(1, kind, **settings).global_batch(step) for kind in (RepeatedPlan, Plan))
        assert all(map(np.array_equal, found, expected))


def test_the_copies_of_an_image_are_in_one_step_and_in_different_micro_batches():
    plan = plan_of(4, num_samples=100, global_batch_size=32, max_samples=8)
    for piece in plan.cut(1):
        assert len(set(piece.samples.tolist())) == 8
    samples, epochs = plan.global_batch(1)
    assert set(Counter(samples.tolist()).values()) == {4}
    assert len(set(zip(samples.tolist(), epochs.tolist(), strict=True))) == 32
