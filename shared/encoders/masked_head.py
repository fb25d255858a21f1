"""Applying the head of a model to the tokens of the loss only: masked tokens, or the first tokens of words."""

from typing import Any

import torch
from torch import Tensor, nn

from shared.compat import of_torch
from shared.models.self_check import keep_if_equal, text_batch


def predict_only_masked(model: Any) -> None:
    """Make `model`, a ...ForMaskedLM or ...ForTokenClassification, accept `masked` [n]: the indices of n tokens.

    It then returns the logits [n, vocabulary or labels] of these tokens only. `masked` indexes the flattened rows of
    the batch; in token classification, these tokens are the first ones of words, and are not masked. The encoder's
    hidden states [rows, length, width] are reduced to [n, width] before the model's own head, which is unchanged. If
    the model has no separate encoder, or `keep_if_equal` finds different logits, the head computes all logits, and
    those at `masked` are selected. A call without `masked` is unchanged.
    """
    encoder, forward = getattr(model, "base_model", model), model.forward
    places: Tensor | None = None  # `masked` of the current call

    def keep_masked(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if places is not None:
            output["last_hidden_state"] = output["last_hidden_state"].flatten(0, 1).index_select(0, places)
        return output

    def forward_masked(_: nn.Module, *args: Any, masked: Tensor | None = None, **arguments: Any) -> Any:
        nonlocal places
        places = masked
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

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    def make_batch(config: Any) -> dict[str, Tensor]:
        return text_batch(config) | {"masked": torch.tensor([1, 2, 4])}  # in the first row

    name = "a head on masked tokens only"
    keep_if_equal(model, name, lambda: hooks.append(encoder.register_forward_hook(keep_masked)), undo, make_batch)
