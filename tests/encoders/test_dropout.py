"""Dropout on a CPU: the share of zeros, the scale of the others, gradients, and which layers it replaces."""

import pytest
import torch
from torch import nn

from shared.encoders.attention import CpuDropout, drop_out, use_cpu_dropout


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.937])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_share_of_zeros_and_the_mean_are_those_of_dropout(probability, dtype):
    torch.manual_seed(0)
    values = torch.ones(1001, 999, dtype=dtype)
    found = drop_out(values, probability)
    assert found.dtype == dtype
    assert found.shape == values.shape
    assert (found == 0).float().mean().item() == pytest.approx(probability, abs=2e-3)
    assert found.max().item() == pytest.approx(1 / (1 - probability), rel=1e-2 if dtype == torch.bfloat16 else 1e-4)
    for columns in found.split(111, 1):  # no column is drawn more often than another
        assert (columns == 0).float().mean().item() == pytest.approx(probability, abs=6e-3)


def test_the_gradient_is_zero_where_the_value_is():
    values = torch.rand(7, 13).add(1).requires_grad_()
    found = drop_out(values, 0.5)
    found.sum().backward()
    assert torch.allclose(values.grad * values.detach(), found.detach())
    assert 0 < (values.grad == 0).sum() < 7 * 13


def test_a_seed_gives_the_same_numbers_and_the_next_call_gives_others():
    values = torch.ones(1000)
    torch.manual_seed(3)
    first, second = drop_out(values, 0.5), drop_out(values, 0.5)
    torch.manual_seed(3)
    assert torch.equal(drop_out(values, 0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("probability", "kept"), [(0.0, 1.0), (1e-9, 1.0), (1.0, 0.0)])
def test_nothing_and_everything_can_be_dropped(probability, kept):
    assert torch.equal(drop_out(torch.ones(5), probability), torch.full((5,), kept))


def test_layers_of_a_model_are_replaced_and_do_nothing_in_evaluation():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Dropout(0.5, inplace=True), nn.Dropout1d())
    use_cpu_dropout(model)
    assert [type(module) for module in model] == [nn.Linear, CpuDropout, nn.Dropout, nn.Dropout1d]
    layer = model[1]
    assert repr(layer) == "CpuDropout(p=0.5, inplace=False)"
    values = torch.ones(100)
    assert 0 < (layer(values) == 0).sum() < 100
    assert layer.eval()(values) is values
