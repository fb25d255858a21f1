"""The head of a masked language model on hidden tokens only: no logits for what nobody asks about."""

from typing import Any

from torch import nn

from shared.errors import UserError


def predict_only_masked(model: Any) -> None:
    """Have `model`, some ...ForMaskedLM, compute logits [n, vocabulary] at the places `masked` [n] it is called with.

    `masked` indexes the flattened rows of the batch. The encoder's hidden states [rows, length, width] become
    [n, width] before they reach the model's own head, whatever that is made of, so what it computes there is unchanged.
    A call without `masked` is what it was.

    Raises:
        UserError: the model does not hand its arguments on to its encoder.
    """
    encoder = model.base_model
    if encoder is model:
        raise UserError(f"--model_name_or_path: {type(model).__name__} has no encoder apart from its head")

    def keep_masked(_: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> Any:
        if (masked := arguments.get("masked")) is not None:
            output["last_hidden_state"] = output["last_hidden_state"].flatten(0, 1).index_select(0, masked)
        return output

    encoder.register_forward_hook(keep_masked, with_kwargs=True)
