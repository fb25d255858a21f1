"""Attention, softmax(query·keyᵀ)·value, by torch's fused kernel, or by two matrix products where the kernel is slow."""

import torch
from torch import Tensor
from torch.nn import functional as F

LONGEST = 512  # tokens of a row; with more, the products save too much memory for the backward pass


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scale: float,
    products: bool | None = None,
) -> Tensor:
    """The result of `F.scaled_dot_product_attention` for query, key and value, all [batch, heads, length, width].

    `mask` is True where a token is attended to, and is broadcast to [batch, heads, length, length]. A token that
    attends to nothing gets a finite value. `products`: whether to use two matrix products; None: if they are faster.
    """
    if not (products_are_faster(query) if products is None else products):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = (query * scale) @ key.transpose(-1, -2)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)  # -inf gives NaN in a fully masked row
    return F.dropout(scores.softmax(-1), dropout) @ value


def products_are_faster(query: Tensor) -> bool:
    """Whether matrix products are faster: on a CPU in bf16, where the kernel's backward takes 2 to 10 times as long."""
    if query.device.type != "cpu" or query.shape[-2] > LONGEST:
        return False
    autocast = torch.is_autocast_enabled("cpu")
    return (torch.get_autocast_dtype("cpu") if autocast else query.dtype) == torch.bfloat16
