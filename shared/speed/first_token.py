"""Compute the last layer for the first token only, in classifiers whose head reads only that token.

These are the classifiers of BERT, RoBERTa and their relatives, of DistilBERT, ViT and DeiT. Their last layer needs the
keys and values of every token, but query, attention and feed-forward network of the first token only. Logits and
gradients equal those of the whole layer, up to rounding. Packed texts (shared/encoders/packing.py) are [1, T, width]
with the boundaries `cu_seq_lens_q`; the last layer then returns the first token of each text, [1, texts, width].

The layers of texts below can also compute other tokens, those at `masked`. shared/encoders/masked_head.py uses this for
models that predict some of the tokens.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shared.compat import of_torch, of_transformers
from shared.models.layers import SHORT
from shared.speed.self_check import image_batch, keep_if_equal, text_batch

# Arguments of a layer, for packed texts.
FILLED = "filled"  # True if the last texts may be empty (--fixed_shapes)
MASKED = "masked"  # [n]: compute the tokens at these ascending indices, instead of the first token of each text
MASKED_ENDS = "cu_seq_lens_masked"  # int32 [texts + 1]: the boundaries of the texts in `masked`
MOST_MASKED = "max_length_masked"  # the largest number of these tokens in a text


def shorten_last_layer(model: Any) -> None:
    """Make the last layer compute the first token only, if the model's head reads only that token.

    The model's `last_hidden_state` is then [batch, 1, width]. If that changes the logits or gradients (see
    `keep_if_equal`), the replacement is undone.
    """
    config: Any = getattr(model, "config", None)
    kind = type(model)
    known = kind.__module__.startswith("transformers.models.")  # a custom head may read every token
    head = kind.__name__.endswith(("ForSequenceClassification", "ForImageClassification"))
    family = getattr(config, "model_type", None) if known and head else None
    if (
        family not in FAMILIES
        or getattr(config, "is_decoder", False)
        or of_transformers.attention_name(config) != "sdpa"
    ):
        return
    layers, forward = FAMILIES[family]
    last = model.base_model.get_submodule(layers)[-1]

    def replace() -> None:
        of_torch.replace_forward(last, forward)

    make_batch = image_batch if kind.__name__.endswith("ForImageClassification") else text_batch
    name = "a last layer that computes the first token only"
    setattr(model, SHORT, keep_if_equal(model, name, replace, lambda: vars(last).pop("forward", None), make_batch))


def bert_layer(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, **more: Any) -> Tensor:
    """Forward pass of transformers' BertLayer and its copies: [batch, length, width] -> [batch, 1, width].

    Here and below `attention_mask` is None or can be broadcast to [batch, heads, length, length]. The result has the
    shape of `kept_tokens`.
    """
    own = layer.attention.self
    projections = own.query, own.key, own.value
    attended = attend_from_kept(
        own, projections, hidden_states, attention_mask, own.attention_head_size, own.dropout.p, more
    )
    return layer.feed_forward_chunk(layer.attention.output(attended, kept_tokens(hidden_states, more)))


def distilbert_layer(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Tensor:
    """Forward pass of transformers' TransformerBlock of DistilBERT: [batch, length, width] -> [batch, 1, width]."""
    own = layer.attention
    projections = own.q_lin, own.k_lin, own.v_lin
    attended = attend_from_kept(
        own, projections, hidden_states, attention_mask, own.attention_head_size, own.dropout.p, more
    )
    hidden = layer.sa_layer_norm(own.out_lin(attended) + kept_tokens(hidden_states, more))
    return layer.output_layer_norm(layer.ffn(hidden) + hidden)


def vit_layer(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Tensor:
    """Forward pass of transformers' ViTLayer and DeiTLayer: [batch, length, width] -> [batch, 1, width]."""
    own, normed = layer.attention, layer.layernorm_before(hidden_states)
    projections = own.q_proj, own.k_proj, own.v_proj
    attended = attend_from_kept(own, projections, normed, attention_mask, own.head_dim, own.attention_dropout, more)
    hidden = layer.dropout(own.o_proj(attended)) + hidden_states[:, :1]
    return layer.dropout(layer.mlp(layer.layernorm_after(hidden))) + hidden


# model_type: (path of the encoder's layers, forward pass of the last layer)
FAMILIES: dict[str, tuple[str, Callable[..., Tensor]]] = {
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), ("encoder.layer", bert_layer)),
    "distilbert": ("transformer.layer", distilbert_layer),
    **dict.fromkeys(("deit", "vit"), ("layers", vit_layer)),
}


def kept_tokens(states: Tensor, more: Mapping[str, Any]) -> Tensor:
    """The first token of each text; of packed texts, the tokens at `masked`, if it is given.

    Args:
        states: [batch, length, ...]; of packed texts, [1, T, ...].
        more: the further arguments of the layer; `cu_seq_lens_q` [texts + 1] are the boundaries of packed texts.

    Returns:
        [batch, 1, ...]; of packed texts, [1, texts, ...] or [1, n, ...].
    """
    if (masked := more.get(MASKED)) is not None:
        return states.flatten(0, 1).index_select(0, masked)[None]
    if (ends := more.get("cu_seq_lens_q")) is None:
        return states[:, :1]
    # An empty text begins after the last token. It gets that token, and nothing reads the result.
    begins = ends[:-1].clamp(max=states.shape[1] - 1) if more.get(FILLED) else ends[:-1]
    return states.index_select(1, begins)


def attend_from_kept(
    own: Any,
    projections: tuple[nn.Module, ...],
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    head_size: int,
    dropout: float,
    more: Mapping[str, Any],
) -> Tensor:
    """Attention of the kept tokens to all, without output projection; it has the shape of `kept_tokens`.

    `own` is the layer's attention module; `projections` are the modules for query, key and value.
    """
    to_query, to_key, to_value = projections
    query, key, value = (
        projected.unflatten(-1, (-1, head_size)).transpose(1, 2)
        for projected in (to_query(kept_tokens(hidden_states, more)), to_key(hidden_states), to_value(hidden_states))
    )
    return attend(own, query, key, value, attention_mask, more, dropout=dropout, scaling=own.scaling)


def attend(
    own: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    more: Mapping[str, Any],
    *,
    dropout: float,
    **settings: Any,
) -> Tensor:
    """Attention by the function that the model's config names: [batch, kept tokens, heads x width].

    query is [batch, heads, kept tokens, width]; key and value are [batch, heads, length, width]. `settings` are further
    arguments of the function.
    """
    boundaries: dict[str, Any] = {}
    empty: Tensor | None = None
    if (ends := more.get("cu_seq_lens_q")) is not None:
        boundaries = {"cu_seq_lens_k": ends, "max_length_k": more["max_length_k"]}
        if MASKED in more:
            boundaries |= {"cu_seq_lens_q": more[MASKED_ENDS], "max_length_q": more[MOST_MASKED], MASKED: more[MASKED]}
        else:  # each text has one token in the query
            each = torch.arange(len(ends), dtype=ends.dtype, device=ends.device)
            if more.get(FILLED):
                real = ends.diff() > 0
                each = each.clamp(max=real.sum(dtype=each.dtype))
                empty = ~real[:, None, None]  # no kernel computes these, so their values and gradients are set to 0
                query = query.masked_fill(empty[:, 0], 0.0)
            boundaries |= {"cu_seq_lens_q": each, "max_length_q": 1}
    context, _ = of_transformers.attention_function(of_transformers.attention_name(own.config))(
        own,
        query,
        key,
        value,
        None if attention_mask is None else attention_mask[:, :, :1],
        dropout=dropout if own.training else 0.0,
        **settings,
        **boundaries,
    )
    return (context if empty is None else context.masked_fill(empty, 0.0)).flatten(2)
