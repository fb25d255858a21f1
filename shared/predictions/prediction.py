"""What a kind of prediction consists of. A new kind is a function that returns a `Prediction`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import UserError, listed
from shared.plan.batches import MicroBatch
from shared.pretrained.from_pretrained import load_pretrained

Outputs = NDArray[np.float32]


@dataclass(frozen=True)
class Prediction:
    """A model with N samples to predict. The model gives `width` numbers for each sample, its outputs."""

    table: pa.Table
    """The columns of the input, [N] rows; the file of predictions begins with them."""
    source: str
    """The name of the input in messages."""
    data: Any
    """The data set of N samples, with `digest()` and what `feed` requires."""
    collate: Callable[[Any], Any]
    """Makes a batch, as for `feed`."""
    batches: Sequence[MicroBatch]
    """All samples in micro-batches. They must not depend on the number of processes, so that the outputs do not."""
    forward: Callable[[Any], Tensor]
    """The outputs [rows, width] of a batch, float32, on the device."""
    width: int
    """The number of outputs of a sample, such as the number of classes."""
    columns: Callable[[Outputs], dict[str, pa.Array]]
    """The columns of the predictions, from outputs [n, width]."""
    score: Callable[[Outputs], dict[str, float]] | None = None
    """The scores by name, from all outputs [N, width]; None if the samples have no labels."""
    notes: dict[str, str] = field(default_factory=dict)
    """Lines to print before the start, by name."""


def load_trained(auto_class: str, folder: str) -> Any:
    """`transformers.AUTO_CLASS.from_pretrained(folder)` in evaluation mode.

    Raises:
        UserError: the folder lacks weights of the model, which would be random; see also `load_pretrained`.
    """
    model, found = load_pretrained(auto_class, folder, output_loading_info=True)
    if lost := sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}):
        raise UserError(f"{Path(folder)} has no weights for {listed(lost)}: fine-tune the model before it predicts")
    return model.eval()
