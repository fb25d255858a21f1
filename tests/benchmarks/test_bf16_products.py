"""Matrix products in bf16 that are computed in float32 equal torch's own products, forward and backward."""

import pytest
import torch

from benchmarks.harness.bf16_products import ProductsInFloat32


def products(dtype):
    """The results of a linear layer and a batched product in `dtype`, and the gradients."""
    generator = torch.Generator().manual_seed(0)
    weight, bias, rows, batch = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((5, 7), (5,), (3, 7), (3, 5, 4))
    )
    hidden = torch.nn.functional.linear(rows, weight, bias)
    result = torch.bmm(hidden[:, None], batch)
    result.float().square().sum().backward()
    return [result, *(tensor.grad for tensor in (weight, bias, rows, batch))]


def test_results_and_gradients_are_those_of_torch_up_to_a_rounding_to_bf16():
    expected = products(torch.bfloat16)
    with ProductsInFloat32():
        found = products(torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)


def test_a_product_is_the_exact_one_rounded_once():
    left, right = (torch.randn(9, 9, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2))
    with ProductsInFloat32():
        product = left @ right
    assert torch.equal(product, (left.double() @ right.double()).bfloat16())


def test_in_inference_mode_a_layer_gives_the_same():
    layer, rows = torch.nn.Linear(9, 5).bfloat16(), torch.randn(2, 3, 9).bfloat16()
    with ProductsInFloat32():
        expected = layer(rows)
        with torch.inference_mode():
            assert torch.equal(layer(rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_formats_are_computed_as_always(dtype):
    expected = products(dtype)
    with ProductsInFloat32():
        assert all(map(torch.equal, products(dtype), expected))
