"""Packing for classifiers: the encoder gets the texts of a micro-batch in one row, and the head gets one row per text.

The encoder computes no padding. Its last hidden states are put back into rows, so that every head stays as it is,
whether it reads the first token or the mean of all tokens. shared/encoders/packing.py has the attention.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from shared.encoders.packing import Packing, PaddedRows, pack_or_pad, packing_is_exact
from shared.text.tokenized import Item, Padding, Rows, TokenizedText, joined


class PackedTexts(Packing):
    """Collates items of `TokenizedText` into one row without padding."""

    def __call__(self, rows: Rows | list[Item]) -> dict[str, Any]:
        """`arguments`, token_type_ids [1, T] if there are any, and labels [texts, …]."""
        lengths, ids, types, targets = rows if isinstance(rows, tuple) else joined(rows)
        batch = self.arguments(ids, lengths)
        if types is not None:
            batch["token_type_ids"] = torch.from_numpy(types.astype(np.int64))[None]
        if targets is not None:
            batch["labels"] = torch.from_numpy(targets)
        return batch

    def arguments(self, tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> dict[str, Any]:
        """Those of `Packing`, and attention_mask [texts, longest] for heads that compute the mean of all tokens."""
        real = np.arange(int(lengths.max())) < lengths[:, None]
        return super().arguments(tokens, lengths) | {"attention_mask": torch.from_numpy(real.astype(np.int64))}


def pack_or_pad_texts(
    model: Any, data: TokenizedText, tokenizer: Any, accelerator: Any, config: Any
) -> tuple[Padding | PackedTexts, str]:
    """The collate function of tokenized texts according to --packing, and a description for the user.

    Raises:
        UserError: see `pad_rows`.
    """
    kinds = PackedTexts, Padding, unpack_before_head
    collate, described = pack_or_pad(model, data, tokenizer, accelerator, config, *kinds)
    return collate, f"; {described}"


def unpack_before_head(model: Any) -> bool:
    """Make a ...ForSequenceClassification accept batches of `PackedTexts`, if that does not change its logits.

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
    exact = packing_is_exact(model, PackedTexts)
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
