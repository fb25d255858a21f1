"""Attention, softmax(query·keyᵀ)·value, by torch's fused kernel, or by two matrix products where the kernel is slow.

And dropout on a CPU, forward and backward 2.6 times as fast as torch's, which draws a number at a time.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LONGEST = 512  # tokens of a row; with more, the products save too much memory for the backward pass
STEPS = 2**16  # of dropout: a probability is rounded to a multiple of 1 / STEPS


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float) -> Tensor:
    """The result of `F.scaled_dot_product_attention` for query, key and value, all [batch, heads, length, width].

    `mask` is True where a token is attended to, and is broadcast to [batch, heads, length, length]. A token that
    attends to nothing gets a finite value.
    """
    if not products_are_faster(query, dropout):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = (query * scale) @ key.transpose(-1, -2)
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min  # -inf gives NaN in a fully masked row
        scores += torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(~mask, lowest)  # faster than to fill scores
    return drop_out(scores.softmax(-1), dropout) @ value


def products_are_faster(query: Tensor, dropout: float) -> bool:
    """Whether matrix products are faster, which they are on a CPU in two cases.

    In bf16 the kernel's backward takes 2 to 10 times as long. With dropout, torch has no kernel and computes the
    products, too, and checks twice for each row of scores whether all of it is masked.
    """
    if query.device.type != "cpu" or query.shape[-2] > LONGEST:
        return False
    autocast = torch.is_autocast_enabled("cpu")
    return dropout > 0 or (torch.get_autocast_dtype("cpu") if autocast else query.dtype) == torch.bfloat16


class CpuDropout(nn.Dropout):
    """`nn.Dropout` by `drop_out`."""

    def forward(self, input: Tensor) -> Tensor:
        """The input, of which some numbers are zero and the others larger."""
        return drop_out(input, self.p) if self.training else input


def use_cpu_dropout(model: nn.Module) -> None:
    """Give the dropout layers of a model the faster computation, in place."""
    for module in model.modules():
        if type(module) is nn.Dropout and not module.inplace:
            module.__class__ = CpuDropout


def drop_out(values: Tensor, probability: float) -> Tensor:
    """`F.dropout` with other draws: each number is zero with `probability`, or divided by 1 - `probability`.

    The draws come from torch's generator, one 64-bit number for four values. Off a CPU this is `F.dropout`.
    """
    dropped = round(probability * STEPS)
    if values.device.type != "cpu" or not 0 < dropped < STEPS or torch.compiler.is_compiling():
        return F.dropout(values, probability)
    count = values.numel()
    bits = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)[:count]
    kept = bits.ge_(dropped - STEPS // 2).to(values.dtype).mul_(STEPS / (STEPS - dropped))
    return values * kept.view(values.shape)
