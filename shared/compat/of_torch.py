"""Private interfaces of torch that the kernel uses; those of the leaves are in of_torch_models."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist


def norms(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """`torch._foreach_norm`: the 2-norm of each tensor, as scalars."""
    return torch._foreach_norm(tensors)


def multiply(tensors: list[Tensor], factor: float | Tensor) -> None:
    """`torch._foreach_mul_`: multiply each tensor in place."""
    torch._foreach_mul_(tensors, factor)


def copy(places: list[Tensor], tensors: list[Tensor], non_blocking: bool = False) -> None:
    """`torch._foreach_copy_`: copy each tensor to its place."""
    torch._foreach_copy_(places, tensors, non_blocking=non_blocking)


def write_counts(tensors: Sequence[Tensor]) -> list[int]:
    """`Tensor._version` of each tensor: the number of in-place writes."""
    return [tensor._version for tensor in tensors]


def default_store() -> dist.Store:
    """`ProcessGroup.get_group_store`, which is undocumented: the store of the default process group."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """`Optimizer._step_supports_amp_scaling`: whether a step reads `found_inf`, and skips itself on the device."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
