"""What a kind of prediction consists of. A new kind is a function that returns a `Prediction`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from safetensors.torch import load_model
from torch import Tensor

from shared.datasets.rows import ROW_COLUMN
from shared.errors import UserError, about, listed
from shared.plan.batches import MicroBatch
from shared.predictions.request import Request
from shared.run.export import WEIGHTS

Outputs = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class OutputsOfWords:
    """Which outputs belong to a sample and to a row of the input, if a row has an output for each of its words."""

    bounds: Ints
    """[rows + 1] where the outputs of each row begin, and their total number M."""
    of_samples: Callable[[Ints], Ints]
    """The numbers of the outputs of samples [n], in the order in which `forward` returns them."""


@dataclass(frozen=True)
class Prediction:
    """A model with N samples to predict. The model gives `width` numbers for each sample or word, its outputs."""

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
    forward: Callable[[MicroBatch, Any], Tensor]
    """The outputs [samples or words, width] of a batch, float32, on the device."""
    width: int
    """The number of outputs of a sample or a word, such as the number of classes."""
    columns: Callable[[pa.Table, Outputs], dict[str, pa.Array]]
    """The columns of the predictions, from some rows of the table and their outputs [n, width]."""
    score: Callable[[Outputs], dict[str, float]] | None = None
    """The scores by name, from all outputs; None if the samples have no labels."""
    has_loss: bool = True
    """Whether the last output is the loss, which may be infinite for a row without a label."""
    words: OutputsOfWords | None = None
    """None: sample i is row i of the table, and has one output. An output that no sample has is 0."""
    notes: dict[str, str] = field(default_factory=dict)
    """Lines to print before the start, by name."""

    def __post_init__(self) -> None:
        """Leave out the column of row numbers and the metadata of the table."""
        columns = [name for name in self.table.column_names if name != ROW_COLUMN]
        object.__setattr__(self, "table", self.table.select(columns).replace_schema_metadata(None))

    @property
    def bounds(self) -> Ints:
        """int64 [rows + 1]: where the outputs of each row begin, and their total number."""
        return np.arange(self.table.num_rows + 1) if self.words is None else self.words.bounds

    def outputs_of(self, samples: Ints) -> Ints:
        """The numbers of the outputs of `samples` [n], in the order in which `forward` returns them."""
        return samples if self.words is None else self.words.of_samples(samples)


def build_model(request: Request, *arguments: Any) -> Any:
    """The model of the recipe's `build_model`, with the trained weights, in evaluation mode.

    Raises:
        UserError: the folder lacks weights of the model, which would be random; or see `build_model` of the recipe.
    """
    model, folder = request.recipe.build_model(request.config, *arguments), request.model
    if request.is_own_model:
        with about(f"{folder / WEIGHTS}"):
            load_model(model, folder / WEIGHTS)
        return model.eval()
    # A second load, without memory for the weights, says which are missing.
    _, found = type(model).from_pretrained(folder, device_map="meta", output_loading_info=True, local_files_only=True)
    lost = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    if lost := [key for key in lost if not key.startswith("pooler.")]:  # embeddings do not use a pooler
        raise UserError(f"{folder} has no weights for {listed(lost)}: fine-tune the model before it predicts")
    return model.eval()
