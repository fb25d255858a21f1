"""Private interfaces of torch that models and their own optimizers use; the kernel uses those of of_torch."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

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


def compile_whole_under_ddp() -> None:
    """`torch._dynamo.config.optimize_ddp`: do not split a compiled module at DDP's buckets of gradients.

    Each layer is compiled by itself, so its gradients are sent after its backward pass anyway.
    """
    import torch._dynamo

    torch._dynamo.config.optimize_ddp = False


def declare_found_inf(optimizer: torch.optim.Optimizer, reads: bool) -> None:
    """Set `Optimizer._step_supports_amp_scaling`, by which torch's GradScaler and `reads_found_inf` decide."""
    optimizer.__dict__["_step_supports_amp_scaling"] = reads


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the forward of one module by `forward(module, ...)`: nn.Module calls an instance's `forward` if set."""
    module.forward = MethodType(forward, module)
