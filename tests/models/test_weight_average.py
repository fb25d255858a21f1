"""The average of the weights equals torch's bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shared.errors import UserError
from shared.models.weight_average import WeightAverage


def accelerator(**more):
    return SimpleNamespace(
        device=torch.device("cpu"), is_fsdp2=False, register_for_checkpointing=lambda _: None, **more
    )


def change(model):
    """Change the weights and the averages and counter of batch norm, as a step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    model(torch.randn(4, 3))


def test_the_average_equals_torchs_bit_for_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    ours = WeightAverage(accelerator(), model, 0.9)
    torchs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(4):
        change(model)
        ours.end_step()
        torchs.update_parameters(model)
        for name, value in torchs.state_dict().items():
            assert torch.equal(value, ours.average.state_dict()[name]), name
    assert ours.average.n_averaged == 4
    assert not torch.equal(ours.model[0].weight, model[0].weight)


def test_the_average_resumes_from_a_checkpoint():
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    whole = WeightAverage(accelerator(), model, 0.5)
    for _ in range(2):
        change(model)
        whole.end_step()
    resumed = WeightAverage(accelerator(), model, 0.5)
    resumed.average.load_state_dict(whole.average.state_dict())
    change(model)
    for average in (whole, resumed):
        average.end_step()
    assert torch.equal(whole.model.weight, resumed.model.weight)
    assert not torch.equal(whole.model.weight, model.weight), "a first step would copy the weights"


def test_without_a_decay_there_is_no_average_and_under_fsdp_it_is_refused():
    assert WeightAverage(accelerator(), nn.Linear(2, 2), None).model is None
    sharded = accelerator()
    sharded.is_fsdp2 = True
    with pytest.raises(UserError, match=r"^--ema_decay 0\.9 does not work under FSDP: leave it out"):
        WeightAverage(sharded, nn.Linear(2, 2), 0.9)
