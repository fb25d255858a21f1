"""Compute the last layer for the first token only, in classifiers whose head reads only that token.

These are the classifiers of BERT, RoBERTa and their relatives, of DistilBERT, ViT and DeiT. Their last layer needs the
keys and values of every token, but query, attention and feed-forward network of the first token only. Logits and
gradients equal those of the whole layer, up to rounding. For packed texts the last layer then returns the first token
of each text, [1, texts, width].

The layers of texts below can also compute the masked tokens. shared/encoders/masked_head.py uses this for models that
predict some of the tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shared.compat import of_torch_models, of_transformers
from shared.speed.self_check import image_batch, keep_if_equal, text_batch


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


def read_by_head(documents: Documents) -> Documents:
    """The tokens that the head reads: the masked ones, or else the first one of each document."""
    if documents.masked is not None:
        return documents.masked
    ends = documents.ends
    return Documents(torch.arange(len(ends), dtype=ends.dtype, device=ends.device), 1, ends[:-1])


def kept_tokens(states: Tensor, documents: Documents | None) -> Tensor:
    """Of [batch, length, ...] the first tokens, [batch, 1, ...]; of a packed row, those of `read_by_head`."""
    if documents is None:
        return states[:, :1]
    places = read_by_head(documents).places
    assert places is not None
    return states.flatten(0, 1).index_select(0, places)[None]


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
    projected = to_query(kept_tokens(hidden_states, documents)), to_key(hidden_states), to_value(hidden_states)
    query, key, value = (part.unflatten(-1, (-1, head_size)) for part in projected)
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

    query is [batch, kept tokens, heads, width]; key and value are [batch, length, heads, width]. `settings` are further
    arguments of the function.
    """
    if documents is not None:
        settings |= {"documents": documents, "queries": read_by_head(documents)}
    context, _ = of_transformers.attention_function(of_transformers.attention_name(own.config))(
        own,
        *(part.transpose(1, 2) for part in (query, key, value)),
        None if attention_mask is None else attention_mask[:, :, :1],
        dropout=dropout if own.training else 0.0,
        **settings,
    )
    return context.flatten(2)


def shorten_last_layer(model: Any) -> None:
    """Make the last layer compute the first token only, if the model's head reads only that token.

    The model's `last_hidden_state` is then [batch, 1, width]. If that changes the logits or gradients (see
    `keep_if_equal`), the replacement is undone.
    """
    kind = type(model)
    of_images = kind.__name__.endswith("ForImageClassification")
    if of_images or kind.__name__.endswith("ForSequenceClassification"):
        name, make_batch = "a last layer that computes the first token only", image_batch if of_images else text_batch
        replace_last_layer(model, FAMILIES, name, make_batch)


def replace_last_layer(
    model: Any,
    families: dict[str, tuple[str, Callable[..., Tensor]]],
    name: str,
    make_batch: Callable[[Any], dict[str, Any]],
) -> None:
    """Replace the forward pass of the last layer by that of the model's family, if that changes no results.

    Without effect on classes of one's own, whose head may read every token, on decoders, and with another attention.
    `last_layer_is_short` of the model tells afterwards whether it is. `families` has the form of FAMILIES.
    """
    config: Any = getattr(model, "config", None)
    known = type(model).__module__.startswith("transformers.models.") and not getattr(config, "is_decoder", False)
    if not known or config.model_type not in families or of_transformers.attention_name(config) != "sdpa":
        return
    layers, forward = families[config.model_type]
    last = model.base_model.get_submodule(layers)[-1]
    replace, undo = (lambda: of_torch_models.replace_forward(last, forward)), (lambda: vars(last).pop("forward", None))
    model.last_layer_is_short = keep_if_equal(model, name, replace, undo, make_batch)


def bert_layer(
    layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, *_: Any, documents: Any = None, **__: Any
) -> Tensor:
    """Forward pass of transformers' BertLayer and its copies: [batch, length, width] -> [batch, 1, width].

    Here and below `attention_mask` is None or can be broadcast to [batch, heads, length, length]. The result has the
    shape of `kept_tokens`.
    """
    own = layer.attention.self
    projections, size = (own.query, own.key, own.value), own.attention_head_size
    attended = attend_from_kept(own, projections, hidden_states, attention_mask, size, own.dropout.p, documents)
    return layer.feed_forward_chunk(layer.attention.output(attended, kept_tokens(hidden_states, documents)))


def distilbert_layer(
    layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, documents: Any = None, **_: Any
) -> Tensor:
    """Forward pass of transformers' TransformerBlock of DistilBERT: [batch, length, width] -> [batch, 1, width]."""
    own = layer.attention
    projections, size = (own.q_lin, own.k_lin, own.v_lin), own.attention_head_size
    attended = attend_from_kept(own, projections, hidden_states, attention_mask, size, own.dropout.p, documents)
    hidden = layer.sa_layer_norm(own.out_lin(attended) + kept_tokens(hidden_states, documents))
    return layer.output_layer_norm(layer.ffn(hidden) + hidden)


def vit_layer(layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Forward pass of transformers' ViTLayer and DeiTLayer: [batch, length, width] -> [batch, 1, width]."""
    own, normed = layer.attention, layer.layernorm_before(hidden_states)
    projections = own.q_proj, own.k_proj, own.v_proj
    attended = attend_from_kept(own, projections, normed, attention_mask, own.head_dim, own.attention_dropout)
    hidden = layer.dropout(own.o_proj(attended)) + hidden_states[:, :1]
    return layer.dropout(layer.mlp(layer.layernorm_after(hidden))) + hidden


# model_type: (path of the encoder's layers, forward pass of the last layer)
FAMILIES: dict[str, tuple[str, Callable[..., Tensor]]] = {
    **dict.fromkeys(("bert", "camembert", "electra", "roberta", "xlm-roberta"), ("encoder.layer", bert_layer)),
    "distilbert": ("transformer.layer", distilbert_layer),
    **dict.fromkeys(("deit", "vit"), ("layers", vit_layer)),
}
