"""Packing for classifiers: the encoder gets the texts of a micro-batch in one row, and the head gets one row per text.

The encoder computes no padding. Its last hidden states are put back into rows, so that every head stays as it is,
whether it reads the first token or the mean of all tokens. shared/encoders/packing.py has the attention.
"""

from typing import Any

from torch import nn

from shared.encoders.packing import PaddedRows, packing_is_exact


def unpack_before_head(model: Any) -> bool:
    """Make a ...ForSequenceClassification accept packed texts, if that does not change its logits.

    Returns whether it accepts them. Padded rows are computed as before.
    """
    if (layers := holder_of_layers(model)) is None:
        return False

    def put_into_rows(_: nn.Module, __: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> Any:
        if (documents := arguments.get("documents")) is not None:
            hidden = output["last_hidden_state"]
            total = hidden.shape[1]
            if total == len(documents.ends) - 1:  # only first tokens: see shared/speed/first_token.py
                output["last_hidden_state"] = hidden.transpose(0, 1)
            else:
                output["last_hidden_state"] = PaddedRows.of([documents], total).pad(hidden[0])[0][:, 0]
        return output

    hook = layers.register_forward_hook(put_into_rows, with_kwargs=True, prepend=True)
    exact = packing_is_exact(model, in_rows=True)
    if not exact:
        hook.remove()
    return exact


def holder_of_layers(model: Any) -> nn.Module | None:
    """The part of a model that holds its list of layers: a BERT's encoder, the whole ModernBERT without its head."""
    encoder = getattr(model, "base_model", model)
    names = (name for name, module in encoder.named_modules() if isinstance(module, nn.ModuleList))
    if (first := next(names, None)) is None:
        return None
    return encoder.get_submodule(first.rpartition(".")[0])
