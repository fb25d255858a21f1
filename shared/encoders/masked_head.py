"""Computing tokens of the loss only, in the head and in the last layer: masked tokens, or the first tokens of words."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared.compat import of_torch_models, of_transformers
from shared.encoders.attention import PADDED, use_packed_attention
from shared.encoders.packing import Packing
from shared.speed import first_token
from shared.speed.first_token import Documents, attend, kept_tokens, replace_last_layer
from shared.speed.self_check import keep_if_equal, text_batch
from shared.text.tokenized import Rows


def predict_only_masked(model: Any, packing: bool) -> None:
    """Make `model`, a ...ForMaskedLM or ...ForTokenClassification, compute the logits of masked tokens only.

    A batch names them: `documents.masked` of packed documents, or else `masked` [n], ascending indices of the flattened
    rows. In token classification, these tokens are the first ones of words, and are not masked. See `MaskedHead`. A
    batch without them is computed as before. With `packing`, the last layer, too, computes only these tokens of packed
    documents: see `compute_only_masked`.
    """
    head = MaskedHead(model.forward)
    of_torch_models.replace_forward(model, head)
    if (encoder := getattr(model, "base_model", model)) is model:
        return
    hooks: list[Any] = []
    is_sparse = keep_if_equal(
        model,
        "a head on masked tokens only",
        lambda: hooks.append(encoder.register_forward_hook(head.keep_masked)),
        lambda: [hook.remove() for hook in hooks],
        lambda config: text_batch(config) | {"masked": torch.tensor([1, 2, 4])},  # in the first row
    )
    if is_sparse and packing:
        compute_only_masked(model)


class MaskedHead:
    """The forward pass of a model for the logits [n, vocabulary or labels] of n masked tokens.

    The encoder's hidden states [rows, length, width] are reduced to [n, width] before the model's own head, which is
    unchanged. If the model has no separate encoder, or `keep_if_equal` finds different logits, the head computes all
    logits, and those of the masked tokens are selected.

    Args:
        forward: the forward pass of the model for all tokens.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.masked: Tensor | None = None  # of the current call

    def __call__(self, _: nn.Module, *args: Any, masked: Tensor | None = None, **arguments: Any) -> Any:
        documents: Documents | None = arguments.get("documents")
        if documents is not None and documents.masked is not None:
            masked = documents.masked.places
        self.masked = masked
        output = self.forward(*args, **arguments)
        self.masked = None
        if masked is None or output.logits.ndim < 3:
            return output
        logits = output.logits[:, : arguments["input_ids"].shape[1]]  # a Perceiver has those of all its positions
        logits = logits.flatten(0, 1).index_select(0, masked)
        if hasattr(output, "_replace"):  # a NamedTuple
            return output._replace(logits=logits)
        output["logits"] = logits
        return output

    def keep_masked(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Hook of the encoder."""
        if self.masked is not None:
            hidden = output["last_hidden_state"].flatten(0, 1)
            only_masked = len(hidden) == len(self.masked)  # the last layer has computed no others, or all are masked
            output["last_hidden_state"] = hidden if only_masked else hidden.index_select(0, self.masked)
        return output


def compute_only_masked(model: Any) -> None:
    """Make the last layer compute the masked tokens only, in packed batches.

    If that changes logits or gradients (see `keep_if_equal`), it is undone. All other batches are computed as before:
    rows with padding, and documents without masked tokens. Without effect on models that are not of one of FAMILIES.
    """
    before = of_transformers.attention_name(model.config)

    def packed_batch(config: Any) -> dict[str, Any]:
        use_packed_attention(model, torch.device("cpu"), "no")
        batch = text_batch(config)
        real = batch["attention_mask"].bool()
        masked = np.array([1, 2, 4, int(real.sum()) - 1])  # none of the second document, the last one of the third
        return Packing.for_model(config)(Rows(real.sum(1).numpy(), batch["input_ids"][real].numpy(), masked=masked))

    families = {family: (layers, of_masked(forward)) for family, (layers, forward) in FAMILIES.items()}
    replace_last_layer(model, families, "a last layer that computes masked tokens only", packed_batch)
    if of_transformers.attention_name(model.config) != before:
        model.set_attn_implementation(before)


def of_masked(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward pass of a layer for the masked tokens of packed documents, and for all tokens of other batches.

    A layer with a window needs the places of the masked tokens if a document is longer than the window. Only
    `padded_attention` takes places; with the other kernel, the whole layer is computed.
    """

    def compute(layer: Any, hidden_states: Tensor, *args: Any, **more: Any) -> Tensor:
        documents: Documents | None = more.get("documents")
        if documents is None or documents.masked is None or not documents.masked.longest:
            return type(layer).forward(layer, hidden_states, *args, **more)
        window = getattr(getattr(layer, "attn", None), "sliding_window", None)
        knows_places = window is None or documents.longest <= window
        knows_places = knows_places or of_transformers.attention_name(layer.attn.config) == PADDED
        return (forward if knows_places else type(layer).forward)(layer, hidden_states, *args, **more)

    return compute


def modernbert_layer(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    documents: Documents | None = None,
    **_: Any,
) -> Tensor:
    """Forward pass of transformers' ModernBertEncoderLayer: [1, T, width] -> [1, n, width].

    One matrix product computes query, key and value. Therefore the query, too, is computed for all tokens.
    """
    assert position_embeddings is not None
    own = layer.attn
    query, key, value = own.Wqkv(layer.attn_norm(hidden_states)).unflatten(-1, (3, -1, own.head_dim)).unbind(-3)
    query = rotated(kept_tokens(query, documents), *(kept_tokens(each, documents) for each in position_embeddings))
    key = rotated(key, *position_embeddings)
    how = {"dropout": own.attention_dropout, "scaling": own.head_dim**-0.5, "sliding_window": own.sliding_window}
    attended = attend(own, query, key, value, attention_mask, documents, **how)
    hidden = kept_tokens(hidden_states, documents) + own.out_drop(own.Wo(attended))
    return hidden + layer.mlp(layer.mlp_norm(hidden))


def rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Query or key [1, tokens, heads, width] with rotary positions; cosine and sine are [1, tokens, width]."""
    first, second = states.float().chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return (states.float() * cosine[:, :, None] + turned * sine[:, :, None]).to(states.dtype)


FAMILIES: dict[str, tuple[str, Callable[..., Tensor]]] = {  # as in shared/speed/first_token.py
    **{family: layers for family, layers in first_token.FAMILIES.items() if family not in ("deit", "vit")},
    "modernbert": ("layers", modernbert_layer),
}
