"""softmax(query·keyᵀ)·value by what is fastest: torch's fused kernel, or two products where that one is slow."""

import torch
from torch import Tensor
from torch.nn import functional as F

LONGEST = 512  # tokens of a row; beyond, what the products keep for the backward pass outgrows the rest


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float,
    products: bool | None = None,
) -> Tensor:
    """What `F.scaled_dot_product_attention` computes, [batch, heads, length, width] from three of that shape.

    `mask` is True where a token is seen, and has a shape that is broadcast to [batch, heads, length, length]; a token
    that sees nothing gets a finite value. `products` is whether to take two products; None: where they are faster.
    """
    if not (products_are_faster(query) if products is None else products):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = (query * scale) @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # with -inf, a row of nothing else is NaN
    return F.dropout(scores.softmax(-1), dropout) @ value


def products_are_faster(query: Tensor) -> bool:
    """On a CPU in bf16: there the fused kernel's backward pass alone takes two to ten times as long as all of this."""
    if query.device.type != "cpu" or query.shape[-2] > LONGEST:
        return False
    autocast = torch.is_autocast_enabled("cpu")
    return (torch.get_autocast_dtype("cpu") if autocast else query.dtype) == torch.bfloat16
