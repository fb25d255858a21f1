"""The average of the weights equals torch's bit for bit; evaluations and the export see it, and training does not."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shared.models.batch_norm import BatchNorm
from shared.models.trainable import WeightAverage


def new_model():
    """A model with trained and frozen parameters, averaged buffers, a counter, and a buffer that stays as it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model[2].bias.requires_grad_(False)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    return model


def begin(model):
    """The hook of a run that is prepared, and that run."""
    registered, hooks = [], [BatchNorm(), WeightAverage(0.9)]
    run = SimpleNamespace(model=model, registered=registered, hooks=hooks)
    run.accelerator = SimpleNamespace(unwrap_model=lambda model: model, register_for_checkpointing=registered.append)
    run.progress, run.evaluate = SimpleNamespace(step=0), lambda: {"weight": model[0].weight[0, 0].item()}
    hooks[1].prepared(run)
    run.hooks = []  # the statistics of a step stay as they are
    return hooks[1], run


def step(model, average, run):
    """Change the weights and batch norm's averages and counter, also after hooks know of the update; average them."""
    average.updated(torch.tensor(1.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * parameter.requires_grad)
        model(torch.randn(4, 3))
    average.step_ended()
    run.progress.step += 1


def test_the_average_equals_torchs_bit_for_bit_and_is_what_an_evaluation_and_the_export_see():
    model = new_model()
    average, run = begin(model)
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(4):
        step(model, average, run)
        torchs.update_parameters(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        assert run.evaluate() == {"weight": torchs.module[0].weight[0, 0].item()}
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    stored = {"0:weight", "0:bias", "1:weight", "1:bias", "2:weight", "1:running_mean", "1:running_var"}
    assert run.registered[0].state_dict().keys() == stored  # of checkpoints
    average.evaluate = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.evaluate()
    average.before_export(model)
    assert not torch.equal(model[0].weight, before["0.weight"])
    expected = torchs.module.state_dict() | {name: before[name] for name in ("1.num_batches_tracked", "mask")}
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
