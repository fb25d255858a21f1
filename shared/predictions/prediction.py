"""What a kind of prediction consists of. A new kind is a function that returns a `Prediction`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from safetensors.torch import load_model
from torch import Tensor

from shared.datasets.rows import ROW_COLUMN, source_of
from shared.errors import UserError, about, listed
from shared.plan.batches import MicroBatch
from shared.predictions.request import Request
from shared.run.export import WEIGHTS

Outputs = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass
class Prediction:
    """A model with N samples to predict. The model gives `width` numbers for each sample or word, its outputs."""

    table: pa.Table
    """The columns of the input, [N] rows; the file of predictions begins with them."""
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
    bounds: Any = None
    """[rows + 1] where the outputs of each row begin, and their total number M. None: each row has one output."""
    outputs_of: Callable[[Ints], Ints] = lambda samples: samples
    """The numbers of the outputs of samples [n], in the order in which `forward` returns them."""
    notes: dict[str, str] = field(default_factory=dict)
    """Lines to print before the start, by name."""
    source: str = field(init=False)
    """The name of the input in messages."""

    def __post_init__(self) -> None:
        """Note the name of the input; leave out the row numbers and the metadata of the table."""
        self.source = source_of(self.table)
        columns = [name for name in self.table.column_names if name != ROW_COLUMN]
        self.table = self.table.select(columns).replace_schema_metadata(None)
        if self.bounds is None:
            self.bounds = np.arange(self.table.num_rows + 1)


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
