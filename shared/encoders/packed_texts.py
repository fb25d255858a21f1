"""Packing for classifiers: the encoder gets the texts of a micro-batch in one row, and the head gets one row per text.

The encoder computes no padding. Its last hidden states are put back into rows, so that every head stays as it is,
whether it reads the first token or the mean of all tokens. shared/encoders/packing.py has the attention.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared.compat import of_torch, of_transformers
from shared.encoders.packing import Packing, pack, packing_is_exact, padded_slots, refuse_fixed_shapes
from shared.encoders.padding import pad_rows
from shared.plan.fixed_shapes import FixedShapes
from shared.speed.first_token import FILLED
from shared.speed.self_check import text_batch
from shared.text.tokenized import Item, Padding, Rows, TokenizedText, joined


class PackedTexts(Packing):
    """Collates items of `TokenizedText` into one row without padding."""

    def __call__(self, rows: Rows | list[Item]) -> dict[str, Any]:
        """`arguments`, token_type_ids [1, T] if there are any, and labels [texts, …]."""
        lengths, ids, types, targets = rows if isinstance(rows, tuple) else joined(rows)
        batch = self.arguments(ids, lengths)
        if types is not None:
            filled = np.pad(types.astype(np.int64), (0, batch["input_ids"].shape[1] - len(types)))
            batch["token_type_ids"] = torch.from_numpy(filled)[None]
        if targets is not None:
            batch["labels"] = torch.from_numpy(targets)
        return batch

    def arguments(self, tokens: NDArray[np.integer], lengths: NDArray[np.int64]) -> dict[str, Any]:
        """Those of `Packing`, and attention_mask [texts, longest] for heads that compute the mean of all tokens."""
        real = np.arange(int(lengths.max())) < lengths[:, None]
        batch = super().arguments(tokens, lengths) | {"attention_mask": torch.from_numpy(real.astype(np.int64))}
        return batch | {FILLED: True} if self.shapes else batch


Collate = Padding | PackedTexts


def pack_or_pad_texts(
    model: Any, train: TokenizedText, validation: TokenizedText, tokenizer: Any, accelerator: Any, config: Any
) -> tuple[Collate, str]:
    """The collate function of tokenized texts according to --packing, and a description for the user.

    If a model cannot be packed exactly, each text has its own row, with padding.

    Raises:
        UserError: --fixed_shapes, and the model cannot be packed; see also `FixedShapes.of_run` and `pad_rows`.
    """
    shapes = FixedShapes.of_run(config)
    if config.packing and unpack_before_head(model, filled=shapes is not None):
        return PackedTexts.for_model(model.config, shapes), f"; {pack(model, accelerator, config, shapes)}"
    refuse_fixed_shapes(model, shapes)
    collate, padding = pad_rows(model, train, validation, tokenizer, config)
    why = f"; one text per row, because a {type(model).__name__} cannot be packed exactly" if config.packing else ""
    return collate, why + padding


def unpack_before_head(model: Any, filled: bool = False) -> bool:
    """Make a ...ForSequenceClassification accept batches of `PackedTexts`, if that does not change its logits.

    Returns whether it accepts them. Padded rows are computed as before. `filled`: the batches have fixed shapes; a
    model that does not accept those cannot be used.
    """
    layers = holder_of_layers(model)
    if layers is None or not of_transformers.takes_registered_attention(model):
        return False
    forward = model.forward
    real: Tensor | None = None  # `attention_mask` of the current call, if its batch is filled

    def put_into_rows(module: nn.Module, _: tuple[Any, ...], arguments: dict[str, Any], output: Any) -> Any:
        if "cu_seq_lens_q" in arguments:
            hidden, ends = output["last_hidden_state"], arguments["cu_seq_lens_q"]
            output["last_hidden_state"] = (
                into_rows(hidden, ends, arguments["max_length_q"]) if real is None else real_rows(hidden, ends, real)
            )
        return output

    def forward_noting_rows(_: nn.Module, *args: Any, **arguments: Any) -> Any:
        nonlocal real
        real = arguments.get("attention_mask") if arguments.get(FILLED) else None
        try:
            return forward(*args, **arguments)
        finally:
            real = None

    hook = layers.register_forward_hook(put_into_rows, with_kwargs=True)
    if filled:
        of_torch.replace_forward(model, forward_noting_rows)
    padded = text_batch(model.config)
    texts = [ids[kept.bool()].numpy() for ids, kept in zip(padded["input_ids"], padded["attention_mask"], strict=True)]
    exact = packing_is_exact(model, texts, PackedTexts, filled)
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


def into_rows(hidden: Tensor, ends: Tensor, longest: int) -> Tensor:
    """Hidden states of packed texts [1, T, width] in rows with zeros after each text: [texts, longest, width].

    A last layer that computes first tokens only (shared/speed/first_token.py) gives [1, texts, width]; the result is
    then [texts, 1, width]. `ends` [texts + 1] are the boundaries of the texts.
    """
    texts, (_, total, width) = len(ends) - 1, hidden.shape
    if total == texts:
        return hidden.transpose(0, 1)
    flat, slots = hidden[0], padded_slots(ends, longest, total)
    if slots is not None:
        flat = flat.new_zeros(texts * longest, width).index_copy(0, slots, flat)
    return flat.view(texts, longest, width)


def real_rows(hidden: Tensor, ends: Tensor, real: Tensor) -> Tensor:
    """As `into_rows`, for the texts of a batch with fixed shapes, without its filling: [texts, longest, width].

    Args:
        hidden: [1, T, width], or first tokens [1, documents, width], for which the result is [texts, 1, width].
        ends: [documents + 1], the boundaries of all documents. The texts come first.
        real: [texts, longest], 0 where a row has no token.
    """
    texts, longest = real.shape
    if hidden.shape[1] == len(ends) - 1:
        return hidden[0, :texts, None]
    place = ends[:texts, None] + torch.arange(longest, dtype=ends.dtype, device=ends.device)
    rows = hidden[0].index_select(0, place.clamp(max=hidden.shape[1] - 1).flatten()).view(texts, longest, -1)
    return rows.masked_fill(real[..., None] == 0, 0.0)
