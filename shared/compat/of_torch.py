"""Private interfaces of torch."""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

BATCH_NORM: type = nn.modules.batchnorm._BatchNorm
"""`torch.nn.modules.batchnorm._BatchNorm`, the base class of all batch norms."""
HAS_ONEDNN_LINEAR = hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.ops.mkldnn._linear_pointwise`: `F.linear` of float32 matrices by oneDNN, if `HAS_ONEDNN_LINEAR`."""
    return torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")


def flash_attention(*of_documents: Any, dropout: float, scale: float | None, window: int | None) -> Tensor:
    """`torch.ops.aten._flash_attention_forward`: attention within documents on a GPU.

    `torch.nn.attention.varlen.varlen_attn` has the same arguments, `of_documents`, but no dropout, and more Python. A
    token attends to `window` tokens on each side; None: to its document.
    """
    options = {"scale": scale, "window_size_left": window, "window_size_right": window}
    return torch.ops.aten._flash_attention_forward(*of_documents, dropout, False, False, **options)[0]


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


def is_compiled(module: nn.Module) -> bool:
    """`nn.Module._compiled_call_impl`: whether a module was compiled in place."""
    return module._compiled_call_impl is not None


def compile_whole_under_ddp() -> None:
    """`torch._dynamo.config.optimize_ddp`: do not split a compiled module at DDP's buckets of gradients.

    Each layer is compiled by itself, so its gradients are sent after its backward pass anyway.
    """
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = False


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """`Optimizer._step_supports_amp_scaling`: whether a step reads `found_inf`. Only some optimizers have it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def declare_found_inf(optimizer: torch.optim.Optimizer, reads: bool) -> None:
    """Set `Optimizer._step_supports_amp_scaling`, by which torch's GradScaler and `reads_found_inf` decide."""
    optimizer.__dict__["_step_supports_amp_scaling"] = reads


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of one module by `forward(module, ...)`: nn.Module calls an instance's `forward` if set."""
    module.forward = MethodType(forward, module)
