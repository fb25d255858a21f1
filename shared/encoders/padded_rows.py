"""Packed documents as padded rows, one for each document and attention head.

All documents of a group are padded to the longest of the group. The padding repeats the last token of its document: no
zeros are written, and what is computed from padding is left out by a mask or never read.
"""

import math
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.speed.first_token import Documents


class PaddedRows(NamedTuple):
    """Where T packed tokens lie in padded rows of one or several groups of documents."""

    shapes: list[tuple[int, int, int]]
    """Of each group: documents, heads, tokens per row."""
    tokens: list[int]
    """Of each group: packed tokens; together T."""
    sources: Tensor
    """int64 [tokens of all rows]: which one of the T x heads packed tokens each of them is."""
    places: Tensor
    """int64 [T x heads]: which one of the tokens of all rows each packed token is."""

    @classmethod
    def of(cls, groups: list[Documents], total: int, heads: int = 1) -> Self:
        """The rows of neighbouring `groups` of documents with T = `total`; one group does not wait for the device."""
        head = torch.arange(heads, device=groups[0].ends.device)
        shapes = [(len(group.ends) - 1, heads, group.longest) for group in groups]
        tokens = [total] if len(groups) == 1 else [int(group.ends[-1]) for group in groups]
        sources, places, packed, padded = [], [], 0, 0
        for (ends, longest, *_), (documents, *_), size in zip(groups, shapes, tokens, strict=True):
            each = torch.arange(max(size, documents, longest), device=ends.device)
            token = torch.minimum(ends[:-1, None] + each[:longest], ends[1:, None] - 1).clamp_(min=0)
            sources.append((packed + token)[:, None] * heads + head[:, None])  # [documents, heads, longest]
            before = each[:documents] * (heads * longest) - ends[:-1]  # the documents
            place = before.repeat_interleave(ends.diff(), output_size=size) + each[:size]
            places.append((padded + place)[:, None] + head * longest)  # [size, heads]
            packed, padded = packed + size, padded + documents * heads * longest
        return cls(shapes, tokens, *(torch.cat([part.flatten() for part in parts]) for parts in (sources, places)))

    def full(self) -> list[bool]:
        """Of each group, whether its rows have no padding."""
        pairs = zip(self.shapes, self.tokens, strict=True)
        return [documents * longest == tokens for (documents, _, longest), tokens in pairs]

    def pad(self, states: Tensor) -> list[Tensor]:
        """[T x heads, width] as [documents, heads, tokens per row, width] of each group."""
        rows = Pad.apply(states, self.sources, self.places)
        parts = [rows] if len(self.shapes) == 1 else rows.split([math.prod(shape) for shape in self.shapes])
        return [part.view(*shape, states.shape[-1]) for part, shape in zip(parts, self.shapes, strict=True)]

    def unpad(self, parts: list[Tensor]) -> Tensor:
        """The inverse of `pad`."""
        rows = [part.reshape(-1, part.shape[-1]) for part in parts]
        return Unpad.apply(rows[0] if len(rows) == 1 else torch.cat(rows), self.places)


class Pad(torch.autograd.Function):
    """`states[sources]`, where `places` are the first occurrences. Padding has no gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, sources: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return states.index_select(0, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient.index_select(0, *ctx.saved_tensors), None, None


class Unpad(torch.autograd.Function):
    """`rows[places]`, where no place occurs twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.shape = rows.shape
        return rows.index_select(0, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_copy_(0, places, gradient), None
