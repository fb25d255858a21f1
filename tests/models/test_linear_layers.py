"""Linear layers by oneDNN equal torch's in outputs and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from shared.compat import of_torch_models
from shared.models import linear_layers
from shared.models.linear_layers import FastLinear, linear, rounded_up, use_fast_products

pytestmark = pytest.mark.skipif(not of_torch_models.HAS_ONEDNN_LINEAR, reason="this torch is built without oneDNN")


@pytest.fixture(autouse=True)
def amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use oneDNN on any CPU."""
    monkeypatch.setattr(linear_layers, "onednn_is_faster", lambda: True)


@pytest.mark.parametrize("shape", [(7,), (1, 7), (50, 7), (3, 5, 7), (2, 0, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_equal_those_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    input = torch.randn(shape, requires_grad=True)
    layer = nn.Linear(7, 4, bias=bias)
    leaves = [input, *layer.parameters()]
    found, expected = linear(input, layer.weight, layer.bias), layer(input)
    torch.testing.assert_close(found, expected)
    factors = torch.randn_like(expected)
    gradients = [torch.autograd.grad((each * factors).sum(), leaves) for each in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_transposed_inputs_and_weights_are_multiplied_without_rounding_to_fewer_bits() -> None:
    input, weight = torch.randn(300, 90).T, torch.randn(300, 50).T
    exact = input.double() @ weight.double().T
    assert (linear(input, weight, None) - exact).abs().max() < 2e-5 * exact.abs().max()


def test_other_dtypes_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_torch_models, "onednn_linear", lambda *_: pytest.fail("oneDNN was called"))
    input, weight = torch.randn(9, 7), torch.randn(4, 7)
    assert torch.equal(linear(input.double(), weight.double(), None), F.linear(input.double(), weight.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(input, weight, None).dtype == torch.bfloat16
    with pytest.raises(pytest.fail.Exception, match="oneDNN"):
        linear(input, weight, None)


def test_a_model_keeps_its_state_and_on_another_cpu_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(7, 4), Own(4, 2))
    input, names = torch.randn(9, 7), list(model.state_dict())
    expected = model(input)
    use_fast_products(model)
    assert [type(layer) for layer in model] == [FastLinear, Own]
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(input), expected)
    monkeypatch.setattr(linear_layers, "onednn_is_faster", lambda: False)
    use_fast_products(another := nn.Sequential(nn.Linear(7, 4)))
    assert type(another[0]) is nn.Linear


@settings(deadline=None)
@given(st.integers(1, 10**6))
def test_few_numbers_of_rows_are_in_use(rows: int) -> None:
    wanted = rounded_up(rows)
    assert rows <= wanted <= rows + max(7, rows / 16)
    assert rounded_up(wanted) == wanted
    assert len({rounded_up(other) for other in range(rows, 2 * rows, max(1, rows // 64))}) <= 17
