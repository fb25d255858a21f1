"""What an update costs the host: with a loss scale hardly more calls than torch's scaler makes by itself."""

import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from shared.config.options import Options
from shared.optimization import gradients
from shared.optimization.optimizers import inner, make_optimizer, step_if_finite

FINITE, MOST = torch.tensor(1.0), 1.1  # times the calls of torch's scaler


def calls(function):
    """The number of calls, of Python functions and of functions written in C, that `function` makes."""
    counted = []
    sys.setprofile(lambda _, event, __: counted.append(event in ("call", "c_call")))
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(counted)


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_an_update_with_a_loss_scale_makes_hardly_more_calls_than_the_scaler_itself(optim):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 2)
    optimizer = accelerator.prepare_optimizer(make_optimizer(model, Options(optim=optim, learning_rate=0.01)))
    scaler = torch.amp.GradScaler("cpu")
    scaled = SimpleNamespace(scaler=scaler, device=torch.device("cpu"), num_processes=1)
    parameters = list(model.parameters())

    def torch_only():
        scaler.step(inner(optimizer))
        scaler.update()

    found = []
    for update in (torch_only, lambda: step_if_finite(scaled, optimizer, FINITE)) * 2:  # the first makes the state
        before = model.weight.detach().clone()
        gradients.backward(scaled, model(torch.ones(1, 4)).sum())
        scaler.unscale_(inner(optimizer))
        found.append(calls(update))
        gradients.set_to_none(parameters)
        assert not torch.equal(model.weight, before)
    *_, alone, ours = found
    assert 0 < alone <= ours <= MOST * alone
    accelerator.free_memory()


@pytest.mark.parametrize("norm", [1.0, torch.inf])
def test_whether_an_update_was_skipped_is_known_on_the_device_even_if_the_gradients_are_on_the_host(norm):
    """The monitor sums it up together with the losses. `meta` stands for a device other than the host."""
    model = nn.Linear(4, 2)
    model(torch.ones(1, 4)).sum().backward()
    accelerator = SimpleNamespace(scaler=None, device=torch.device("meta"))
    before = model.weight.detach().clone()
    skipped = step_if_finite(accelerator, make_optimizer(model, Options(learning_rate=0.01)), torch.tensor(norm))
    assert skipped.device.type == "meta"
    assert torch.equal(model.weight, before) == (norm == torch.inf)
