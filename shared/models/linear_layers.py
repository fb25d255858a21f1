"""Matrix products: those of linear layers on CPUs of AMD, about twice as fast in float32, and some without TF32.

torch multiplies float32 matrices by MKL, which computes with 256 bits on these CPUs even if they have registers of 512
bits (AVX-512). oneDNN, which torch contains as well, uses all of them. Both compute in float32, and they agree up to
rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from shared.compat import of_torch_models

CPU_INFO = Path("/proc/cpuinfo")  # of Linux
STEP = 8  # rows


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute matrix products of float32 in float32: TF32 keeps three decimal digits. Also a decorator."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def use_fast_products(model: nn.Module) -> None:
    """Give the linear layers of a model the faster product, in place, if this machine has one."""
    for module in model.modules() if onednn_is_faster() else ():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


class FastLinear(nn.Linear):
    """`nn.Linear` by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`; float32 on a CPU of AMD is computed by oneDNN.

    Args:
        input: [..., width].
        weight: [outputs, width].
        bias: [outputs].
    """
    if torch.compiler.is_compiling():  # the compiler does not know the operator
        return F.linear(input, weight, bias)
    in_float32 = input.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    plain = input.device.type == "cpu" and type(weight) in (nn.Parameter, Tensor)  # not the shards of FSDP
    if not (in_float32 and plain and input.numel() and onednn_is_faster()):
        return F.linear(input, weight, bias)
    rows = input.reshape(-1, input.shape[-1])
    if more := rounded_up(len(rows)) - len(rows):
        rows = F.pad(rows, (0, 0, 0, more))
    output = Product.apply(rows, weight, bias)
    return (output[:-more] if more else output).view(*input.shape[:-1], len(weight))


class Product(torch.autograd.Function):
    """input [rows, width] @ weight.T [width, outputs] + bias [outputs], by oneDNN in both directions."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return of_torch_models.onednn_linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            of_torch_models.onednn_linear(gradient, weight.T, None) if of_input else None,
            of_torch_models.onednn_linear(gradient.T, input.T, None) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


def rounded_up(rows: int) -> int:
    """The number of rows for `rows`, at most one sixteenth larger.

    oneDNN compiles a kernel for each shape, which takes milliseconds and up to 2 MiB that stay in use.
    """
    step = max(STEP, 2 ** (rows.bit_length() - 5))
    return -(-rows // step) * step


@cache
def onednn_is_faster() -> bool:
    """Whether torch would use MKL on a CPU of AMD that has AVX-512, and this torch has the operator of oneDNN."""
    mkl, wide = torch.backends.mkl.is_available(), torch.backends.cpu.get_cpu_capability() == "AVX512"
    of_amd = CPU_INFO.exists() and "AuthenticAMD" in CPU_INFO.read_text()
    return mkl and wide and of_amd and of_torch_models.HAS_ONEDNN_LINEAR
