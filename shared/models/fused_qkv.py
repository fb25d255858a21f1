"""`--fused_qkv`: query, key and value of an attention layer by one matrix product instead of three.

The three linear layers keep their parameters and their names, so optimizer, weight decay, clipping, sharding,
checkpoints and the exported model stay as they are. Each forward pass concatenates the three weights, which takes
little time beside the product if a micro-batch has many tokens. Autograd divides the gradient again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared.compat import of_torch
from shared.config.options import Options
from shared.errors import UserError
from shared.models.first_token import is_short
from shared.models.self_check import image_batch, keep_if_equal, text_batch

NAMES = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"), ("q_proj", "k_proj", "v_proj"))
FAMILIES = ("bert", "camembert", "deit", "distilbert", "electra", "roberta", "vit", "xlm-roberta")


def fuse_qkv(config: Options, model: Any) -> None:
    """Apply --fused_qkv to a model, in place. Call it after `shorten_last_layer`, before `prepare`.

    A last layer that computes only the tokens that the head reads stays as it is: its query has another input than key
    and value.

    Raises:
        UserError: the model is not of one of FAMILIES, or its logits or gradients would change (see `keep_if_equal`).
    """
    if not config.fused_qkv:
        return
    kind = type(model)
    known = kind.__module__.startswith("transformers.models.")  # a class of one's own may call the layers differently
    family = getattr(getattr(model, "config", None), "model_type", None)
    found = triples(model)
    found = found[: len(found) - is_short(model)]
    if not known or family not in FAMILIES or not found:
        raise UserError(
            f"--fused_qkv does not suit a {kind.__name__}: it is for models of transformers of the types "
            f"{', '.join(FAMILIES)}, with two layers or more; leave it out"
        )

    def replace() -> None:
        for layers in found:
            fuse(*layers)

    def undo() -> None:
        for layer in (layer for layers in found for layer in layers):
            vars(layer).pop("forward", None)
            vars(layer).pop("fused", None)

    make_batch = image_batch if kind.__name__.endswith("ForImageClassification") else text_batch
    if not keep_if_equal(model, "--fused_qkv", replace, undo, make_batch):
        raise UserError(f"--fused_qkv does not work with this {kind.__name__}, see above: leave it out")


def triples(model: nn.Module) -> list[tuple[nn.Linear, nn.Linear, nn.Linear]]:
    """The linear layers for query, key and value of each attention layer, in the order of the layers."""
    found = []
    for module in model.modules():
        for names in NAMES:
            query, key, value = (getattr(module, name, None) for name in names)
            if isinstance(query, nn.Linear) and isinstance(key, nn.Linear) and isinstance(value, nn.Linear):
                found.append((query, key, value))
    return found


@dataclass
class Fused:
    """The three layers of an attention layer that one product computes; a copy of the model has its own."""

    layers: tuple[nn.Linear, nn.Linear, nn.Linear]
    computed: tuple[Tensor, Tensor, Tensor] | None = None
    """The input of `query`, and the results of `key` and `value`, until these are called."""


def fuse(query: nn.Linear, key: nn.Linear, value: nn.Linear) -> None:
    """Make `query` compute the products of all three layers; `key` and `value` then return their parts.

    All are called with the same input, `query` first and `value` last. With another input they compute their own.
    """
    fused: Any = Fused((query, key, value))
    for layer, forward in zip(fused.layers, (compute_all, take_key, take_value), strict=True):
        layer.fused = fused
        of_torch.replace_forward(layer, forward)


def compute_all(query: Any, hidden: Tensor) -> Tensor:
    """Forward pass of `query`."""
    layers = query.fused.layers
    weight = torch.cat([layer.weight for layer in layers]).to(hidden.dtype)
    bias = None if query.bias is None else torch.cat([layer.bias for layer in layers]).to(hidden.dtype)
    first, second, third = F.linear(hidden, weight, bias).split([layer.out_features for layer in layers], -1)
    query.fused.computed = hidden, second, third
    return first


def take_key(key: Any, hidden: Tensor) -> Tensor:
    """Forward pass of `key`."""
    computed = key.fused.computed
    if computed is None or computed[0] is not hidden:
        return type(key).forward(key, hidden)
    return computed[1]


def take_value(value: Any, hidden: Tensor) -> Tensor:
    """Forward pass of `value`."""
    computed, value.fused.computed = value.fused.computed, None
    if computed is None or computed[0] is not hidden:
        return type(value).forward(value, hidden)
    return computed[2]
