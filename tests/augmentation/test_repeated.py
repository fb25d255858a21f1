"""With repeated augmentation a step has each image several times, and a pass still has every sample equally often."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shared.plan.batches import Plan
from shared.plan.draws import permutation


@given(*(st.integers(1, most) for most in (5, 40, 30, 3, 8, 99)))
def test_every_pass_has_each_sample_in_each_of_its_epochs_once(repeats, count, batch, passes, rows, seed):
    settings = {"num_samples": count, "global_batch_size": batch, "num_epochs": passes * repeats, "seed": seed}
    plan = Plan(max_samples=rows, repeats=repeats, **settings)
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
    plan = Plan(seed=0, num_epochs=8, num_samples=100, global_batch_size=32, max_samples=8, repeats=4)
    for piece in plan.cut(1):
        assert len(set(piece.samples.tolist())) == 8
    samples, epochs = plan.global_batch(1)
    assert set(Counter(samples.tolist()).values()) == {4}
    assert len(set(zip(samples.tolist(), epochs.tolist(), strict=True))) == 32
