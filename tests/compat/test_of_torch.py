"""The installed torch has the private interfaces that we use."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

from shared.compat import of_torch, of_torch_models

TORCH = f"torch {torch.__version__}"


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((300, 70), (7,), ())]


def test_norms_products_and_copies_equal_those_of_single_calls(tensors):
    assert all(map(torch.equal, of_torch.norms(tensors), map(torch.linalg.vector_norm, tensors)))
    for factor in (0.3, torch.tensor(0.3)):
        found = [torch.zeros_like(tensor) for tensor in tensors]
        of_torch.copy(found, tensors, non_blocking=True)
        of_torch.multiply(found, factor)
        assert all(map(torch.equal, found, [tensor * factor for tensor in tensors]))


def test_a_write_to_a_tensor_is_counted(tensors):
    before = of_torch.write_counts(tensors)
    assert of_torch.write_counts(tensors) == before
    tensors[1].add_(1)
    changed = [a != b for a, b in zip(of_torch.write_counts(tensors), before, strict=True)]
    assert changed == [False, True, False], f"{TORCH}: Tensor._version does not count writes to a tensor"


def test_the_store_of_the_process_group_is_found():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert of_torch.default_store() is of_torch.default_store(), f"{TORCH}: each call makes a new store"
    finally:
        dist.destroy_process_group()


def test_an_optimizer_that_reads_found_inf_is_recognized():
    parameters = [nn.Parameter(torch.zeros(2))]
    fused = torch.optim.AdamW(parameters, fused=True)
    assert of_torch.reads_found_inf(fused), f"{TORCH}: Optimizer._step_supports_amp_scaling is gone"
    other = torch.optim.RMSprop(parameters)
    assert not of_torch.reads_found_inf(other)
    of_torch_models.declare_found_inf(other, True)
    assert of_torch.reads_found_inf(other)


def test_batch_norms_are_recognized_by_a_common_class():
    for norm in (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2)):
        assert isinstance(norm, of_torch_models.BATCH_NORM)
    assert not isinstance(nn.LayerNorm(2), of_torch_models.BATCH_NORM)


def test_a_module_calls_the_forward_that_replaced_its_own():
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    of_torch_models.replace_forward(module, lambda self, x: (self, x))
    assert module("x") == (module, "x"), f"{TORCH}: nn.Module no longer calls the forward of the instance"
    assert isinstance(other(torch.zeros(2)), torch.Tensor)


def test_onednn_multiplies_in_float32() -> None:
    assert of_torch_models.HAS_ONEDNN_LINEAR
    input, weight, bias = torch.randn(40, 30), torch.randn(20, 30), torch.randn(20)
    torch.testing.assert_close(of_torch_models.onednn_linear(input, weight, bias), F.linear(input, weight, bias))
