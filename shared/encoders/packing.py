"""The rows of a batch of texts: all texts of a micro-batch in one row without padding, or each in a row of its own.

A packed model gets one row of all tokens, positions that restart with each text, and the boundaries of the texts. It
attends within them (shared/encoders/attention.py). The head of a classifier gets one row for each text, so that every
head stays as it is, whether it reads the first token or the mean of all tokens.

Trials at the start show whether a model computes packed texts exactly, and whether its output for a text depends on
padding.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared.compat import of_transformers
from shared.encoders.attention import PaddedRows, use_packed_attention
from shared.errors import about
from shared.pretrained.tokenizers import OFFSET_POSITIONS
from shared.speed.first_token import Documents
from shared.speed.self_check import outputs_of, same, text_batch
from shared.text.tokenized import Item, Padding, Rows, joined

TRIAL_TOKENS, TRIAL_PADDING = 13, 8  # the trial's row and its padding; an odd number of tokens reveals pooling of pairs


@dataclass(frozen=True)
class Packing:
    """Collates texts: one row without padding."""

    first_position: int = 0
    packed: ClassVar[bool] = True
    draws_random: ClassVar[bool] = False

    @classmethod
    def for_model(cls, config: Any) -> Self:
        """For a model with this `PretrainedConfig`: models like RoBERTa count positions from the padding id + 1."""
        return cls(config.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0)

    def padded_lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The cost of documents in tokens, int64 [N]: their lengths, because nothing is padded."""
        return lengths

    def __call__(self, rows: Rows | list[Item]) -> dict[str, Any]:
        """input_ids and position_ids [1, T], token_type_ids if there are any, `Documents`, and labels [texts, …].

        If single tokens have targets: labels [n], and these tokens in `documents`. Otherwise the model has a head that
        gets rows: attention_mask [texts, longest].
        """
        lengths, ids, types, targets, masked = rows if isinstance(rows, tuple) else joined(rows)
        ends = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(len(ids)) - np.repeat(ends[:-1], lengths) + self.first_position
        documents = Documents(torch.from_numpy(ends.astype(np.int32)), int(lengths.max()))
        batch: dict[str, Any] = {
            "input_ids": torch.from_numpy(ids.astype(np.int64, copy=False))[None],
            "position_ids": torch.from_numpy(positions)[None],
        }
        if types is not None:
            batch["token_type_ids"] = torch.from_numpy(types.astype(np.int64))[None]
        if targets is not None:
            batch["labels"] = torch.from_numpy(targets)
        if masked is None:  # a head needs it that computes the mean of all tokens of a text
            batch["attention_mask"] = torch.from_numpy((np.arange(lengths.max()) < lengths[:, None]).astype(np.int64))
        else:
            bounds = np.searchsorted(masked, ends).astype(np.int32)
            of_masked = Documents(torch.from_numpy(bounds), int(np.diff(bounds).max()), torch.from_numpy(masked))
            documents = documents._replace(masked=of_masked)
        return batch | {"documents": documents}


def packing_is_exact(model: Any, in_rows: bool = False) -> bool:
    """Whether packed texts have the same outputs as texts in rows; with `in_rows`, the head of a model gets rows.

    A few texts are computed both ways. Attention is not the only connection between tokens in all models: in a
    MobileBERT, each token also uses the embeddings of its neighbours. The packed attention is never causal.
    """
    before = of_transformers.attention_name(model.config) if of_transformers.takes_registered_attention(model) else None
    if before is None or any(getattr(module, "is_causal", False) for module in model.modules()):
        return False
    batch = text_batch(model.config)
    real = batch["attention_mask"].bool()[1:]
    packed = Packing.for_model(model.config)(Rows(real.sum(1).numpy(), batch["input_ids"][1:][real].numpy()))
    if not in_rows:
        del packed["attention_mask"]
    try:
        expected = [rows[1:] for rows in outputs_of(model, batch)]  # packed without the longest: rows get shorter
        use_packed_attention(model, torch.device("cpu"), "no")

        def alike(one: Tensor, rows: Tensor) -> bool:
            """Whether outputs are equal: of packed tokens [1, T, ...], or of rows, perhaps [rows, longest, ...]."""
            if rows.shape[:2] == real.shape:  # only real tokens count
                return alike(one[real[:, : one.shape[1]]] if len(one) == len(rows) else one[0], rows[real])
            return one.shape == rows.shape and same(one, rows)

        return all(alike(*pair) for pair in zip(outputs_of(model, packed), expected, strict=True))
    except Exception:  # any model: one may not pass the documents on to its attention
        return False
    finally:
        model.set_attn_implementation(before)


def pack_or_pad(
    model: Any,
    data: Any,
    tokenizer: Any,
    accelerator: Any,
    config: Any,
    exact: Callable[[Any], bool] = packing_is_exact,
) -> tuple[Padding | Packing, str]:
    """The collate function for the texts of `data` according to --packing, and a description of it for the user.

    If packed texts would attend to each other in this model, each has its own row, with padding.

    Args:
        exact: whether the model can be packed; `unpack_before_head` for classifiers.

    Raises:
        UserError: see `pad_rows`.
    """
    if config.packing and exact(model):
        precision = config.activation_dtype or config.mixed_precision
        return Packing.for_model(model.config), use_packed_attention(model, accelerator.device, precision)
    collate, padding = pad_rows(model, data, tokenizer, config)
    why = f", because a {type(model).__name__} cannot be packed exactly" if config.packing else ""
    return collate, f"one text per row{why}{padding}"


def pad_rows(model: Any, data: Any, tokenizer: Any, config: Any) -> tuple[Padding, str]:
    """The collate function of rows for a model, and a description for the user, empty if padding does not matter.

    Padding comes after a text, or before it as in the tokenizer if the output then does not depend on it: the head of
    an XLNet reads the last token of a row. If the output depends on it in any case (because a model uses Fourier
    transforms over tokens, or pools pairs of them), all rows are padded to --max_length, so that the output for a text
    does not depend on the other texts of the batch.

    Args:
        model: not yet on its device.
        data: token ids of each sample, or tuples that begin with them and with token types or None.
        tokenizer: has a padding token.
        config: the recipe's config.

    Raises:
        UserError: the model cannot compute rows of --max_length.
    """
    row, types, *_ = data[0] if isinstance(data[0], tuple) else (data[0], None)
    usual, longest = 8 if config.activation_dtype or config.mixed_precision != "no" else 1, config.max_length
    padding = min(TRIAL_PADDING, longest // 2)
    most = min(TRIAL_TOKENS, longest - padding, len(row))
    kept = np.r_[: (most - 1) // 2 * 2, len(row) - 1]  # an odd number of tokens, always with the last one
    item = row[kept], None if types is None else types[kept], None

    def padded(length: int) -> list[Tensor]:
        return outputs_of(model, Padding(tokenizer.pad_token_id, length, length, left)([item]))

    for left in dict.fromkeys((False, getattr(tokenizer, "padding_side", "") == "left")):
        real = slice(padding * left, padding * left + len(kept))
        with suppress(Exception):  # the model supports only some lengths
            pairs = zip(padded(len(kept) + padding), padded(len(kept)), strict=True)
            # If there is an output for each token, those of the padding do not matter.
            if all(same(more if more.shape == few.shape else more[:, real], few) for more, few in pairs):
                return Padding(tokenizer.pad_token_id, usual, longest, left), ""
    with about(f"--max_length {longest}: a {type(model).__name__} cannot compute rows of that length"):
        padded(longest)
    return Padding(tokenizer.pad_token_id, longest, longest, left), (
        f"; each padded to --max_length {longest}, because padding changes the output of a {type(model).__name__}: "
        f"use the model with padding='max_length', max_length={longest} in its tokenizer"
    )


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
                rows = PaddedRows.of([documents], total)
                output["last_hidden_state"] = rows.split(hidden[0].index_select(0, rows.sources))[0][:, 0]
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
