"""A dataset on another machine is asked for coming samples before they are needed; the order stays the plan's."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from shared.plan.batches import Plan
from shared.plan.loading import Loader


class Elsewhere(Dataset):
    """Notes the samples that were asked for ahead, and how many of them had been when one was read."""

    samples_ahead = 20

    def __init__(self):
        self.asked, self.read = [], []

    def __len__(self):
        return 100

    def prefetch(self, samples):
        self.asked += samples.tolist()

    def read_micro_batch(self, samples, epochs):
        self.read += samples.tolist()
        assert self.asked[: len(self.read)] == self.read
        return len(self.asked) - len(self.read)


@pytest.mark.parametrize("rows", [5, 50], ids=["small micro-batches", "micro-batches larger than the window"])
def test_the_next_samples_are_asked_for_in_the_order_of_the_plan(rows):
    data = Elsewhere()
    plan = Plan(num_samples=100, seed=1, global_batch_size=50, num_epochs=2, max_samples=rows)
    loader = Loader(data, plan, lambda ahead: ahead, torch.device("cpu"))
    pairs = [pair for step in range(plan.total_steps) for pair in loader.micro_batches(step)]
    planned = [m.samples for step in range(plan.total_steps) for m in plan.micro_batches(step)]
    assert data.read == data.asked == np.concatenate(planned).tolist()
    ahead = [found for _, found in pairs]
    assert min(ahead[: -20 // rows - 1]) >= min(data.samples_ahead, rows)
    assert max(ahead) <= max(data.samples_ahead, rows)
    assert ahead[-1] == 0


def test_a_step_out_of_order_begins_anew():
    data = Elsewhere()
    plan = Plan(num_samples=100, seed=1, global_batch_size=10, num_epochs=1)
    loader = Loader(data, plan, lambda ahead: ahead, torch.device("cpu"))
    list(loader.micro_batches(0))
    data.asked, data.read = [], []
    ((micro_batch, _),) = loader.micro_batches(7)
    assert data.read == micro_batch.samples.tolist() == plan.micro_batches(7)[0].samples.tolist()
