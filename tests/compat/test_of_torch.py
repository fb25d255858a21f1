"""The installed torch has the private interfaces that we use; if one is missing, the result is the same."""

import importlib.util

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

from shared.checkpoints.staging import Staging
from shared.compat import of_torch
from shared.errors import UserError

TORCH = f"torch {torch.__version__}"


def without(monkeypatch, owner, name):
    """shared/compat/of_torch.py as it would be if torch did not have this name."""
    monkeypatch.delattr(owner, name)
    spec = importlib.util.find_spec(of_torch.__name__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((300, 70), (7,), ())]


def test_norms_equal_those_of_single_calls(tensors, monkeypatch):
    assert hasattr(torch, "_foreach_norm"), f"{TORCH}: torch._foreach_norm is gone; used to clip gradients"
    expected = of_torch.norms(tensors)
    found = without(monkeypatch, torch, "_foreach_norm").norms(tensors)
    assert all(map(torch.equal, found, expected)), f"{TORCH}: _foreach_norm adds up in another order than vector_norm"


@pytest.mark.parametrize("factor", [0.3, torch.tensor(0.3)])
def test_products_equal_those_of_single_calls(tensors, factor, monkeypatch):
    assert hasattr(torch, "_foreach_mul_"), f"{TORCH}: torch._foreach_mul_ is gone; used to clip gradients"
    expected, found = ([tensor.clone() for tensor in tensors] for _ in range(2))
    of_torch.multiply(expected, factor)
    without(monkeypatch, torch, "_foreach_mul_").multiply(found, factor)
    assert all(map(torch.equal, found, expected)), f"{TORCH}: _foreach_mul_ multiplies in another way than mul_"
    assert not torch.equal(found[0], tensors[0])


def test_copies_equal_those_of_single_calls(tensors, monkeypatch):
    assert hasattr(torch, "_foreach_copy_"), f"{TORCH}: torch._foreach_copy_ is gone; used to save and to average"
    for module in (of_torch, without(monkeypatch, torch, "_foreach_copy_")):
        found = [torch.zeros_like(tensor) for tensor in tensors]
        module.copy(found, tensors, non_blocking=True)
        assert all(map(torch.equal, found, tensors))


def test_a_write_to_a_tensor_is_counted(tensors):
    assert of_torch.COUNTS_WRITES, f"{TORCH}: Tensor._version is gone; used to detect changes of a tensor during a copy"
    before = of_torch.write_counts(tensors)
    assert of_torch.write_counts(tensors) == before
    tensors[1].add_(1)
    changed = [a != b for a, b in zip(of_torch.write_counts(tensors), before, strict=True)]
    assert changed == [False, True, False], f"{TORCH}: Tensor._version does not count writes to a tensor"


def test_without_counts_of_writes_a_save_copies_everything_immediately(tensors, monkeypatch):
    monkeypatch.setattr(of_torch, "COUNTS_WRITES", False)  # Tensor._version itself cannot be deleted
    state = {str(i): tensor for i, tensor in enumerate(tensors)}
    staging = Staging({"model.safetensors": state})
    try:
        monkeypatch.setattr(staging._thread, "submit", lambda *_: None)  # what it would copy later
        staging.copy({"model.safetensors": state}, [tensor.data_ptr() for tensor in tensors])
        assert all(map(torch.equal, staging.places["model.safetensors"].values(), tensors))
    finally:
        staging.close()


def test_the_store_of_the_process_group_is_found(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        store = of_torch.default_store()
        assert hasattr(dist.ProcessGroup, "get_group_store"), (
            f"{TORCH}: ProcessGroup.get_group_store is gone; used for heartbeats and for signals during evaluation"
        )
        assert of_torch.default_store() is store, f"{TORCH}: each call of get_group_store makes a new store"
        monkeypatch.delattr(dist.ProcessGroup, "get_group_store")
        with pytest.raises(UserError, match=r"torch .* has no ProcessGroup.get_group_store.*requirements.txt"):
            of_torch.default_store()
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def test_a_module_compiled_in_place_is_recognized(monkeypatch):
    module = nn.Linear(2, 2)
    assert not of_torch.is_compiled(module), f"{TORCH}: nn.Module._compiled_call_impl is gone; used to count operations"
    module.compile(backend="eager")
    assert of_torch.is_compiled(module), f"{TORCH}: nn.Module.compile does not set _compiled_call_impl"
    monkeypatch.delattr(nn.Module, "_compiled_call_impl")
    assert of_torch.is_compiled(nn.Linear(2, 2)), "without the private attribute, every module must count as compiled"


def test_an_optimizer_that_reads_found_inf_is_recognized():
    parameters = [nn.Parameter(torch.zeros(2))]
    fused = torch.optim.AdamW(parameters, fused=True)
    assert of_torch.reads_found_inf(fused), (
        f"{TORCH}: Optimizer._step_supports_amp_scaling is gone; used to skip a step without waiting for a GPU"
    )
    other = torch.optim.RMSprop(parameters)
    assert not of_torch.reads_found_inf(other)
    of_torch.declare_found_inf(other, True)
    assert of_torch.reads_found_inf(other)


def test_batch_norms_are_recognized_by_a_common_class(monkeypatch):
    assert (getattr(nn.modules.batchnorm, "_BatchNorm", None),) == of_torch.BATCH_NORMS, (
        f"{TORCH}: torch.nn.modules.batchnorm._BatchNorm is gone; used to find batch norms"
    )
    kinds = (nn.BatchNorm1d(2), nn.BatchNorm2d(2), nn.BatchNorm3d(2), nn.SyncBatchNorm(2))
    for module in (of_torch, without(monkeypatch, nn.modules.batchnorm, "_BatchNorm")):
        assert all(isinstance(norm, module.BATCH_NORMS) for norm in kinds)
        assert not isinstance(nn.LayerNorm(2), module.BATCH_NORMS)


def test_a_module_calls_the_forward_that_replaced_its_own():
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    of_torch.replace_forward(module, lambda self, x: (self, x))
    assert module("x") == (module, "x"), f"{TORCH}: nn.Module no longer calls the forward of the instance"
    assert isinstance(other(torch.zeros(2)), torch.Tensor)


def test_onednn_multiplies_in_float32() -> None:
    assert of_torch.HAS_ONEDNN_LINEAR
    input, weight, bias = torch.randn(40, 30), torch.randn(20, 30), torch.randn(20)
    torch.testing.assert_close(of_torch.onednn_linear(input, weight, bias), F.linear(input, weight, bias))
