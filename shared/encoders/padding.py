"""Whether what a model says of a text depends on the padding beside it, found out by computing it with and without."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import UserError
from shared.models.self_check import logits_of, same
from shared.text.tokenized import Padding, TokenizedText

TRIED, PADDED = 13, 8  # tokens of the row that is tried, and by how many it is padded; an odd number shows pooling


def pad_rows(
    model: Any, train: TokenizedText, validation: TokenizedText, tokenizer: Any, config: Any
) -> tuple[Padding, str]:
    """What makes batches of tokenized texts for a model, and what is to be said of it: see `padding_for`.

    Raises:
        UserError: see `padding_for` and `check_ends`.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        check_ends(model, train, validation)
    row, types, _ = train[0]
    multiple, said = padding_for(model, row, tokenizer, config, types)
    return Padding(tokenizer.pad_token_id, multiple, config.max_length), said


def check_ends(model: Any, *datasets: TokenizedText) -> None:
    """Classifiers made of an encoder and a decoder (T5, BART) read the end-of-sequence token, one in each text.

    Raises:
        UserError: some text has none, or several.
    """
    for data in datasets:
        ends = np.add.reduceat(data.input_ids == model.config.eos_token_id, data.offsets[:-1])
        if len(wrong := np.flatnonzero(ends != 1)):
            raise UserError(
                f"--model_name_or_path: a {type(model).__name__} reads the end-of-sequence token (id "
                f"{model.config.eos_token_id}), of which each text must have one; row {wrong[0]} has {ends[wrong[0]]}: "
                "take a tokenizer that ends texts with it, and leave out rows that spell it"
            )


def padding_for(
    model: Any, row: NDArray[np.integer], tokenizer: Any, config: Any, types: NDArray[np.integer] | None = None
) -> tuple[int, str]:
    """The multiple that rows are padded to, and what is to be said of it, empty where padding is not seen.

    A model that sees padding (it mixes tokens by Fourier transforms, or pools pairs of them) gets all rows padded to
    --max_length: then what it says of a text does not depend on which others are in the batch.

    Args:
        model: not yet on its device.
        row: token ids of some sample, and `types` its token types if there are any.

    Raises:
        UserError: the model cannot compute rows of --max_length.
    """
    usual, longest = 8 if config.mixed_precision != "no" else 1, config.max_length
    if longest <= PADDED + 1:
        return usual, ""
    kept = np.r_[np.arange(len(row))[: min(TRIED, longest - PADDED) - 1], len(row) - 1]  # with the token that ends it

    def padded(length: int) -> Tensor:
        batch = {"input_ids": np.full(length, tokenizer.pad_token_id), "attention_mask": np.zeros(length, np.int64)}
        batch["input_ids"][: len(kept)], batch["attention_mask"][: len(kept)] = row[kept], 1
        if types is not None:
            batch["token_type_ids"] = np.r_[types[kept], np.zeros(length - len(kept), types.dtype)].astype(np.int64)
        logits = logits_of(model, {name: torch.from_numpy(ids)[None] for name, ids in batch.items()})
        return logits[:, : len(kept)] if logits.ndim == 3 else logits

    try:
        if same(padded(len(kept) + PADDED), padded(len(kept))):
            return usual, ""
    except RuntimeError:  # it takes some lengths only
        pass
    try:
        padded(longest)
    except RuntimeError as error:
        raise UserError(
            f"--max_length {longest}: a {type(model).__name__} cannot compute rows of that length "
            f"({' '.join(str(error).split())[:200]}): give one that fits its config, or take another model"
        ) from None
    return longest, (
        f"; each padded to --max_length {longest}, because a {type(model).__name__} sees padding: give its tokenizer "
        f"padding='max_length', max_length={longest} when the model is used"
    )
