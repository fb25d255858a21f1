"""The documents of a packed row, and a layer's attention from the tokens that the model's head reads to all tokens."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared.compat import of_transformers


class Documents(NamedTuple):
    """The documents of a packed row of T tokens. A packed batch has them as `documents`; layers and attention get it.

    It is a named tuple because Accelerate, DDP and torch.compile look into those.
    """

    ends: Tensor
    """int32 [documents + 1]: the boundaries of the documents, from 0 to T."""
    longest: int
    """The number of tokens of the longest document."""
    places: Tensor | None = None
    """int64 [T]: the indices of these tokens in the whole row, ascending; None: they are the whole row."""
    masked: "Documents | None" = None
    """The tokens that the head reads, such as the masked ones; some or all documents may have none."""


def kept_tokens(states: Tensor, documents: Documents | None) -> Tensor:
    """The tokens that the head reads: the masked ones, or else the first one of each text.

    Args:
        states: [batch, length, ...]; of packed texts, [1, T, ...].
        documents: of packed texts.

    Returns:
        [batch, 1, ...]; of packed texts, [1, texts, ...] or [1, masked tokens, ...].
    """
    if documents is None:
        return states[:, :1]
    if documents.masked is None:
        return states.index_select(1, documents.ends[:-1])
    assert documents.masked.places is not None
    return states.flatten(0, 1).index_select(0, documents.masked.places)[None]


def attend_from_kept(
    own: Any,
    projections: tuple[nn.Module, ...],
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    head_size: int,
    dropout: float,
    documents: Documents | None = None,
) -> Tensor:
    """Attention of the kept tokens to all, without output projection; it has the shape of `kept_tokens`.

    `own` is the layer's attention module; `projections` are the modules for query, key and value.
    """
    to_query, to_key, to_value = projections
    query, key, value = (
        projected.unflatten(-1, (-1, head_size)).transpose(1, 2)
        for projected in (
            to_query(kept_tokens(hidden_states, documents)),
            to_key(hidden_states),
            to_value(hidden_states),
        )
    )
    return attend(own, query, key, value, attention_mask, documents, dropout=dropout, scaling=own.scaling)


def attend(
    own: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    documents: Documents | None,
    *,
    dropout: float,
    **settings: Any,
) -> Tensor:
    """Attention by the function that the model's config names: [batch, kept tokens, heads x width].

    query is [batch, heads, kept tokens, width]; key and value are [batch, heads, length, width]. `settings` are further
    arguments of the function.
    """
    if documents is not None:
        settings |= {"documents": documents, "queries": documents.masked or first_tokens(documents)}
    context, _ = of_transformers.attention_function(of_transformers.attention_name(own.config))(
        own,
        query,
        key,
        value,
        None if attention_mask is None else attention_mask[:, :, :1],
        dropout=dropout if own.training else 0.0,
        **settings,
    )
    return context.flatten(2)


def first_tokens(documents: Documents) -> Documents:
    """The first token of each document."""
    ends = documents.ends
    return Documents(torch.arange(len(ends), dtype=ends.dtype, device=ends.device), 1)
