"""The last layer of a classifier that reads the first token only, computed for that token only.

The heads of BERT, RoBERTa and their relatives look at nothing else. Keys and values of the last layer are needed for
every token; its queries, its attention and its feed-forward network for one. Logits and gradients are those of the
whole layer, to rounding.
"""

from types import MethodType
from typing import Any

from torch import Tensor, nn

FAMILIES = ("bert", "camembert", "electra", "roberta", "xlm-roberta")
SHORT = "last_layer_is_short"


def shorten_last_layer(model: Any) -> None:
    """Have the last layer compute the first token only, where the model's head reads no other; else change nothing.

    The model's `last_hidden_state` is then [batch, 1, width].
    """
    config = getattr(model, "config", None)
    family = getattr(config, "model_type", None) if type(model).__name__.endswith("ForSequenceClassification") else None
    if config and family in FAMILIES and not config.is_decoder and config._attn_implementation == "sdpa":
        attention = model.base_model.encoder.layer[-1].attention
        attention.forward = MethodType(attend_from_first, attention)
        setattr(model, SHORT, True)


def is_short(model: nn.Module) -> bool:
    """Whether the last layer computes the first token only."""
    return getattr(model, SHORT, False)


def attend_from_first(
    attention: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **more: Any
) -> tuple[Tensor, None]:
    """The forward pass of transformers' BertAttention and its copies: [batch, length, width] -> [batch, 1, width].

    `attention_mask` is None or has a shape that is broadcast to [batch, heads, length, length].
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own, first = attention.self, hidden_states[:, :1]
    query, key, value = (
        projected.unflatten(-1, (-1, own.attention_head_size)).transpose(1, 2)
        for projected in (own.query(first), own.key(hidden_states), own.value(hidden_states))
    )
    context, _ = ALL_ATTENTION_FUNCTIONS[own.config._attn_implementation](
        own,
        query,
        key,
        value,
        None if attention_mask is None else attention_mask[:, :, :1],
        dropout=own.dropout.p if own.training else 0.0,
        scaling=own.scaling,
    )
    return attention.output(context.flatten(2), first), None
