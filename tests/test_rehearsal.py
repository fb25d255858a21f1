"""The discarded pass leaves no trace, and names parameters that would never be trained."""

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from shared.errors import UserError
from shared.rehearsal import rehearse


class Net(nn.Module):
    def __init__(self, unused=False):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        if unused:
            self.forgotten = nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x)


def test_parameters_buffers_gradients_and_random_state_are_as_before():
    torch.manual_seed(0)
    model = Net()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    rehearse(Accelerator(cpu=True), model, lambda: model(torch.randn(8, 4)).sum())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(rng, torch.get_rng_state())


def test_parameters_without_a_gradient_are_named():
    model = Net(unused=True)
    with pytest.raises(UserError, match=r"forgotten\.weight, forgotten\.bias"):
        rehearse(Accelerator(cpu=True), model, lambda: model(torch.randn(8, 4)).sum())


def test_frozen_parameters_are_no_mistake():
    model = Net(unused=True)
    model.forgotten.requires_grad_(False)
    rehearse(Accelerator(cpu=True), model, lambda: model(torch.randn(8, 4)).sum())
