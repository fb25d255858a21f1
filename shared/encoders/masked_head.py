"""Computing tokens of the loss only, in the head and in the last layer: masked tokens, or the first tokens of words."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared.compat import of_torch, of_transformers
from shared.encoders.packing import PADDED, Packing, use_packed_attention
from shared.models.layers import SHORT
from shared.speed import first_token
from shared.speed.first_token import MASKED, MASKED_ENDS, attend, kept_tokens
from shared.speed.self_check import keep_if_equal, text_batch

SPARSE = "head_is_sparse"


def predict_only_masked(model: Any) -> None:
    """Make `model`, a ...ForMaskedLM or ...ForTokenClassification, accept `masked` [n]: the indices of n tokens.

    It then returns the logits [n, vocabulary or labels] of these tokens only. `masked` indexes the flattened rows of
    the batch, ascending; in token classification, these tokens are the first ones of words, and are not masked. The
    encoder's hidden states [rows, length, width] are reduced to [n, width] before the model's own head, which is
    unchanged. If the model has no separate encoder, or `keep_if_equal` finds different logits, the head computes all
    logits, and those at `masked` are selected. A call without `masked` is unchanged.
    """
    encoder, forward = getattr(model, "base_model", model), model.forward
    places: Tensor | None = None  # `masked` of the current call

    def keep_masked(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if places is not None:
            hidden = output["last_hidden_state"].flatten(0, 1)
            only_masked = len(hidden) == len(places)  # the last layer has computed no other tokens, or all are masked
            output["last_hidden_state"] = hidden if only_masked else hidden.index_select(0, places)
        return output

    def forward_masked(_: nn.Module, *args: Any, masked: Tensor | None = None, **arguments: Any) -> Any:
        nonlocal places
        places = masked
        if MASKED_ENDS in arguments:  # the model passes such arguments on to its layers
            arguments[MASKED] = masked
        try:
            output = forward(*args, **arguments)
        finally:
            places = None
        if masked is None or output.logits.ndim < 3:
            return output
        logits = output.logits.flatten(0, 1).index_select(0, masked)
        if hasattr(output, "_replace"):  # a NamedTuple
            return output._replace(logits=logits)
        output["logits"] = logits
        return output

    of_torch.replace_forward(model, forward_masked)
    if encoder is model:
        return
    hooks: list[Any] = []

    def replace() -> None:
        hooks.append(encoder.register_forward_hook(keep_masked))

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    def make_batch(config: Any) -> dict[str, Tensor]:
        return text_batch(config) | {MASKED: torch.tensor([1, 2, 4])}  # in the first row

    setattr(model, SPARSE, keep_if_equal(model, "a head on masked tokens only", replace, undo, make_batch))


def compute_only_masked(config: Any, model: Any) -> None:
    """Make the last layer compute the tokens at `masked` only, in batches of `Packing` with their boundaries.

    It needs the keys and values of all tokens, but query, attention and feed-forward network of these tokens only. If
    that changes logits or gradients (see `keep_if_equal`), it is undone. All other batches are computed as before: rows
    with padding, and calls without `masked`.

    Without effect on models that `predict_only_masked` has not adapted or that are not of one of FAMILIES; and with
    --fixed_shapes, because the number of masked tokens varies.
    """
    kind = type(model)
    known = getattr(model, SPARSE, False) and kind.__module__.startswith("transformers.models.")
    family = getattr(getattr(model, "config", None), "model_type", None) if known else None
    if (
        family not in FAMILIES
        or not getattr(config, "packing", False)
        or getattr(config, "fixed_shapes", False)
        or getattr(model.config, "is_decoder", False)
        or of_transformers.attention_name(model.config) != "sdpa"
    ):
        return
    layers, forward = FAMILIES[family]
    last = model.base_model.get_submodule(layers)[-1]

    def compute(layer: Any, hidden_states: Tensor, *args: Any, **more: Any) -> Tensor:
        whole = MASKED not in more or not knows_places(layer, more)
        return (type(layer).forward if whole else forward)(layer, hidden_states, *args, **more)

    def replace() -> None:
        of_torch.replace_forward(last, compute)

    name = "a last layer that computes masked tokens only"
    use_packed_attention(model, torch.device("cpu"), "no")
    try:
        kept = keep_if_equal(model, name, replace, lambda: vars(last).pop("forward", None), packed_batch)
    finally:
        model.set_attn_implementation("sdpa")
    setattr(model, SHORT, kept)


def knows_places(layer: Any, more: dict[str, Any]) -> bool:
    """Whether the attention of a layer knows the places of the masked tokens, or needs none because it has no window.

    Of all kernels only `padded_attention` takes places. The others compute the whole layer if a document is longer than
    the window.
    """
    window = getattr(getattr(layer, "attn", None), "sliding_window", None)
    if window is None or more["max_length_k"] <= window:
        return True
    return of_transformers.attention_name(layer.attn.config) == PADDED


def modernbert_layer(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **more: Any,
) -> Tensor:
    """Forward pass of transformers' ModernBertEncoderLayer: [1, T, width] -> [1, n, width].

    One matrix product computes query, key and value. Therefore the query, too, is computed for all tokens.
    """
    assert position_embeddings is not None
    own = layer.attn
    query, key, value = own.Wqkv(layer.attn_norm(hidden_states)).unflatten(-1, (3, -1, own.head_dim)).unbind(-3)
    query = rotated(kept_tokens(query, more), *(kept_tokens(each, more) for each in position_embeddings))
    key = rotated(key, *position_embeddings)
    attended = attend(
        own,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask,
        more,
        dropout=own.attention_dropout,
        scaling=own.head_dim**-0.5,
        sliding_window=own.sliding_window,
    )
    hidden = kept_tokens(hidden_states, more) + own.out_drop(own.Wo(attended))
    return hidden + layer.mlp(layer.mlp_norm(hidden))


def rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Query or key [1, tokens, heads, width] with rotary positions; cosine and sine are [1, tokens, width]."""
    first, second = states.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (states.float() * cosine[:, :, None] + turned * sine[:, :, None]).to(states.dtype)


ALIKE = ("bert", "camembert", "distilbert", "electra", "roberta", "xlm-roberta")
FAMILIES: dict[str, tuple[str, Callable[..., Tensor]]] = {  # as in shared/speed/first_token.py
    **{family: first_token.FAMILIES[family] for family in ALIKE},
    "modernbert": ("layers", modernbert_layer),
}


def packed_batch(config: Any) -> dict[str, Any]:
    """The documents of `text_batch` as a batch of `Packing`; the second has no masked token, the third its last one."""
    padded = text_batch(config)
    rows = [ids[real.bool()].numpy() for ids, real in zip(padded["input_ids"], padded["attention_mask"], strict=True)]
    lengths = np.array([len(row) for row in rows])
    masked = np.array([1, 2, 4, lengths.sum() - 1])
    batch = Packing.for_model(config, only_masked=True)((np.concatenate(rows), lengths, masked, masked))
    del batch["labels"]
    return batch
