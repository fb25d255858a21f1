"""Matrix products in bf16, as a GPU computes them, at the speed of float32 on a CPU without instructions for bf16."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
PRODUCTS |= {aten.linear.default, aten.matmul.default}  # in inference mode, these are not divided into the ones above


class ProductsInFloat32(TorchDispatchMode):
    """Computes matrix products of bf16 tensors in float32, and rounds the result to bf16.

    A product of two bf16 numbers is exact in float32, so only the sums are rounded, in float32: this is what the matrix
    units of a GPU do. Without instructions for bf16, torch's own products take a hundred times as long.
    """

    def __torch_dispatch__(self, operator: Any, _: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the operator; a product of bf16 tensors with copies of them in float32."""
        if operator in PRODUCTS and args[0].dtype == torch.bfloat16:
            wide = [value.float() if isinstance(value, torch.Tensor) else value for value in args]
            return operator(*wide, **(kwargs or {})).bfloat16()
        return operator(*args, **(kwargs or {}))
