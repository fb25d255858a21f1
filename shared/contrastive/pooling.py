"""Pooling: one embedding for each text, from the hidden states of its tokens."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shared.errors import UserError

Pooling = Literal["mean", "cls"]


def add_pooling(model: Any, pooling: Pooling) -> None:
    """Make an encoder of transformers (AutoModel) also return the embedding of each text, [texts, width].

    The embeddings are not normalized. They are named `logits`, because the checks of shared/speed compare the output
    of that name. The weights and the export do not change.

    Raises:
        UserError: the model has a decoder besides its encoder.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"--model_name_or_path: a {type(model).__name__} has an encoder and a decoder, and this recipe trains "
            "encoders: use a model such as BERT, or the encoder alone, saved with save_pretrained"
        )
    model.register_forward_hook(partial(add_embeddings, pooling), with_kwargs=True)


def add_embeddings(pooling: Pooling, _: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> Any:
    """Forward hook: add the embeddings to the output of an encoder that got the keyword arguments `arguments`."""
    output["logits"] = embeddings(output["last_hidden_state"], arguments.get("attention_mask"), pooling)
    return output


def embeddings(hidden: Tensor, mask: Tensor | None, pooling: Pooling) -> Tensor:
    """The mean of the hidden states [texts, length, width] where `mask` [texts, length] is 1, or the first of them.

    The mean is computed in float32 or float64 and returned in the dtype of the hidden states.
    """
    if pooling == "cls":
        return hidden[:, 0]
    exact = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if mask is None:
        return exact.mean(1).to(hidden.dtype)
    weights = mask[..., None].to(exact.dtype)
    return ((exact * weights).sum(1) / weights.sum(1)).to(hidden.dtype)
