"""Choosing the padding of a batch: a trial shows whether the output of a model for a text depends on its padding."""

from typing import Any

import numpy as np
from torch import Tensor

from shared.errors import about
from shared.speed.self_check import outputs_of, same
from shared.text.tokenized import Padding

TRIAL_TOKENS, TRIAL_PADDING = 13, 8  # the trial's row and its padding; an odd number of tokens reveals pooling of pairs


def pad_rows(model: Any, data: Any, tokenizer: Any, config: Any) -> tuple[Padding, str]:
    """The collate function of rows for a model, and a description for the user, empty if padding does not matter.

    If padding changes the output of a model (because it uses Fourier transforms over tokens, or pools pairs of them),
    all rows are padded to --max_length, so that the output for a text does not depend on the other texts of the batch.

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
    short = Padding(tokenizer.pad_token_id, usual, longest)
    if longest <= TRIAL_PADDING + 1:
        return short, ""
    most = min(TRIAL_TOKENS, longest - TRIAL_PADDING)
    kept = np.r_[np.arange(len(row))[: most - 1], len(row) - 1]  # always includes the last token

    item = row[kept], None if types is None else types[kept], None

    def padded(length: int) -> list[Tensor]:
        return outputs_of(model, Padding(tokenizer.pad_token_id, length, length)([item]))

    try:
        pairs = zip(padded(len(kept) + TRIAL_PADDING), padded(len(kept)), strict=True)
        # If there is an output for each token, those of the padding do not matter.
        if all(same(more if more.shape == few.shape else more[:, : len(kept)], few) for more, few in pairs):
            return short, ""
    except RuntimeError:  # the model supports only some lengths
        pass
    with about(f"--max_length {longest}: a {type(model).__name__} cannot compute rows of that length"):
        padded(longest)
    return Padding(tokenizer.pad_token_id, longest, longest), (
        f"; each padded to --max_length {longest}, because padding changes the output of a {type(model).__name__}: "
        f"use the model with padding='max_length', max_length={longest} in its tokenizer"
    )
