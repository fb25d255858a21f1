"""What a kind of prediction is: a function that returns a `Prediction`. The simplest one predicts a table."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from safetensors.torch import load_model
from torch import Tensor
from torch.utils.data import default_collate

from shared.datasets.rows import ROW_COLUMN, column_of, source_of, typed_column_of
from shared.datasets.tables import read_file, skip_incomplete
from shared.errors import UserError, about, count_of, listed
from shared.models.transformers_models import loading_info
from shared.plan.batches import MicroBatch
from shared.predictions.request import Request
from shared.run.export import WEIGHTS

Outputs = NDArray[np.float32]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
PREDICTION = "prediction"  # a column
ROW = "row"  # the column of the numbers, from 1, of the rows of the validation data of a table
BLOCK_ROWS = 1 << 16  # rows of the file that are written at once


@dataclass
class Prediction:
    """A model with N samples to predict. It gives outputs for each sample or word, such as a class and its loss."""

    table: pa.Table
    """The columns of the input, [N] rows; the file of predictions begins with them."""
    data: Any
    """The data set of N samples, with `digest()` and what `feed` requires."""
    collate: Callable[[Any], Any]
    """Makes a batch, as for `feed`."""
    batches: Sequence[MicroBatch]
    """All samples in micro-batches. They must not depend on the number of processes, so that the outputs do not."""
    model: Any
    """In evaluation mode, not yet prepared by Accelerate."""
    predict_batch: Callable[[Any, MicroBatch, Any], Sequence[Tensor]]
    """The outputs of the model for a batch, each [samples or words, ...]: predictions, losses, and others."""
    widths: tuple[int, ...]
    """How many numbers each output has for a sample or word: 1 for the losses."""
    notes: dict[str, str]
    """Lines to print before the start, by name."""
    columns: Callable[..., dict[str, pa.Array]]
    """The columns of the predictions, from some rows of the table and their outputs, each [n, its width]."""
    blocks: Callable[[Outputs], Iterator[pa.Table]] | None = None
    """The rows of the file, from all outputs, if it has others than the table; None: all rows, with `columns`."""
    score: Callable[..., dict[str, float]] | None = None
    """The scores by name, from all outputs; None if the samples have no labels."""
    has_loss: bool = True
    """Whether the second output is the loss, which may be infinite for a row without a label."""
    bounds: Any = None
    """[rows + 1] where the outputs of each row begin, and their total number M. None: each row has one output."""
    outputs_of: Callable[[Ints], Ints] = lambda samples: samples
    """The numbers of the outputs of samples [n], in the order in which `predict_batch` returns them."""
    source: str = field(init=False)
    """The name of the input in messages."""

    def __post_init__(self) -> None:
        """Note the name of the input; leave out the row numbers and the metadata of the table."""
        self.source = source_of(self.table)
        fields = [field.remove_metadata() for field in self.table.schema if field.name != ROW_COLUMN]
        self.table = self.table.select([field.name for field in fields]).cast(pa.schema(fields))
        if self.bounds is None:
            self.bounds = np.arange(self.table.num_rows + 1)

    def compute(self, model: Any, micro_batch: MicroBatch, batch: Any) -> Tensor:
        """The outputs [n, all widths] of a model for a batch, in float32 and in the order of `outputs_of`.

        Raises:
            UserError: `predict_batch` of the recipe gives outputs of other shapes.
        """
        each = self.predict_batch(model, micro_batch, batch)[: len(self.widths)]
        count = len(self.outputs_of(micro_batch.samples))
        if [(output.shape[:1], output.numel()) for output in each] != [((count,), count * w) for w in self.widths]:
            raise UserError(
                f"predict_batch of the recipe gives {listed([[*output.shape] for output in each])} for a batch, not "
                f"{listed([[count, width] for width in self.widths])} (docs/predictions.md)"
            )
        return torch.cat([output.float().reshape(count, -1) for output in each], dim=1)

    def split(self, outputs: Outputs) -> list[Outputs]:
        """Each output [n, its width] of the outputs [n, all widths] side by side."""
        ends = np.cumsum((0, *self.widths))
        return [outputs[:, start:end] for start, end in pairwise(ends)]

    def with_columns(self, outputs: Outputs) -> Iterator[pa.Table]:
        """Yield blocks of the table with the columns of the predictions."""
        for start in range(0, self.table.num_rows, BLOCK_ROWS):
            block = self.table.slice(start, BLOCK_ROWS)
            found = outputs[self.bounds[start] : self.bounds[start + block.num_rows]]
            for name, column in self.columns(block, *self.split(found)).items():
                block = block.append_column(name, column)
            yield block


def build_model(request: Request, *arguments: Any) -> Any:
    """The model of the recipe's `build_model`, with the trained weights, in evaluation mode.

    Raises:
        UserError: the folder lacks weights of the model, which would be random; or see `build_model` of the recipe.
    """
    model, folder = request.call("build_model", request.config, *arguments), request.model
    if request.is_own_model:
        with about(f"{folder / WEIGHTS}"):
            load_model(model, folder / WEIGHTS)
        return model.eval()
    found = loading_info(type(model), folder)
    lost = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    if lost := [key for key in lost if not key.startswith("pooler.")]:  # embeddings do not use a pooler
        raise UserError(f"{folder} has no weights for {listed(lost)}: fine-tune the model before it predicts")
    return model.eval()


def load_data(request: Request) -> tuple[Any, ...]:
    """What `load_data` of the recipe returns for the data of the run: the labels of a model without a config, ...

    Raises:
        UserError: the data have changed since the run.
    """
    found: tuple[Any, ...] = request.call("load_data", request.config)
    if request.digests_of_run not in ([], [found[0].digest(), found[1].digest()]):
        raise UserError(f"{request.run}: the data of the run, which its model needs, have changed: restore them")
    return found


def read_rows(request: Request, columns: Sequence[str] = (), flag: str = "") -> pa.Table:
    """The rows of FILE, with --skip_incomplete_rows without those that have no value in `columns`.

    Raises:
        UserError: FILE cannot be read or lacks one of `columns`, which `flag` names.
    """
    table = read_file(str(request.file), "FILE", getattr(request.config, "csv_delimiter", None))
    for name in columns:
        column_of(table, name, flag)
    return skip_incomplete(table, columns) if columns and request.config.skip_incomplete_rows else table


def predict_table(_: Any, request: Request) -> Prediction:
    """The prediction of the rows of FILE, or of the run's validation data.

    Raises:
        UserError: the model or the rows cannot be used.
    """
    recipe = request.recipe
    of_run: tuple[Any, ...] = ()
    if request.file is None or len(inspect.signature(recipe.build_model).parameters) > 1:
        of_run = load_data(request)
    learned = of_run[2:]
    if request.file is None:
        data = of_run[1]
        table = pa.table({ROW: np.arange(1, len(data) + 1)})
    else:
        table = read_rows(request)
        columns = {name: typed_column_of(table, name).to_numpy() for name in table.column_names}  # a gap is NaN
        with about(f"{source_of(table)} (columns: {', '.join(columns)})"):
            data = request.call("encode", request.config, columns, *learned)

    def collate(samples: list[Any]) -> Any:
        with about(f"the samples of {recipe.__file__} cannot become a batch (docs/predictions.md)"):
            return default_collate(samples)

    def columns_of(_: pa.Table, predictions: Outputs, __: Outputs) -> dict[str, pa.Array]:
        return {PREDICTION: pa.array(predictions[:, 0])}

    def score(_: Outputs, losses: Outputs) -> dict[str, float]:
        known = losses[~np.isnan(losses)].astype(np.float64)  # NaN for a row without a target
        return {"eval_loss": float(known.mean())} if len(known) else {}

    return Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=request.batches(data.lengths),
        model=build_model(request, *learned),
        predict_batch=partial(request.call, "predict_batch"),
        widths=(1, 1),
        columns=columns_of,
        score=score if request.config.scores else None,
        notes={"model": str(request.model), "data": count_of(len(data), "row")},
    )
