"""The head of a masked language model on hidden tokens only: no logits for what nobody asks about."""

from typing import Any

from torch import nn

from shared.errors import UserError


def predict_only_masked(model: Any) -> None:
    """Have `model`, some ...ForMaskedLM, compute logits [n, vocabulary] at the places `masked` [n] it is called with.

    `masked` indexes the flattened rows of the batch. The encoder's hidden states [rows, length, width] become
    [n, width] before they reach the model's own head, whatever that is made of, so what it computes there is unchanged.
    A call without `masked` is what it was. The first one with it raises UserError if the model does not hand its
    arguments on to its encoder.

    Raises:
        UserError: the model has no encoder apart from its head.
    """
    encoder = model.base_model
    if encoder is model:
        raise UserError(f"--model_name_or_path: {type(model).__name__} has no encoder apart from its head")

    reached = False

    def keep_masked(_: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> Any:
        nonlocal reached
        if (masked := arguments.get("masked")) is not None:
            reached = True
            output["last_hidden_state"] = output["last_hidden_state"].flatten(0, 1).index_select(0, masked)
        return output

    def refuse_dense(_: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any], ___: Any) -> None:
        if arguments.get("masked") is not None:
            first.remove()
            if not reached:
                raise UserError(
                    f"--model_name_or_path: {type(model).__name__} does not tell its encoder which tokens are hidden, "
                    "so it would compute logits for all of them: take a BERT, RoBERTa or ModernBERT"
                )

    encoder.register_forward_hook(keep_masked, with_kwargs=True)
    first = model.register_forward_hook(refuse_dense, with_kwargs=True)
