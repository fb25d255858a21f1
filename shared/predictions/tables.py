"""Predictions of a recipe on a table, such as of numbers: the recipe's `encode` reads the columns."""

import inspect
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import default_collate

from shared.datasets.rows import source_of, typed_column_of
from shared.errors import about, count_of
from shared.plan.batches import Budget, evaluation_batches
from shared.predictions.labels import PREDICTION
from shared.predictions.prediction import Outputs, Prediction, build_model, load_data, read_rows
from shared.predictions.request import Request

ROW = "row"  # the column of the numbers, from 1, of the rows of the run's validation data


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
            data = recipe.encode(request.config, columns, *learned)

    def columns_of(_: pa.Table, predictions: Outputs, __: Outputs) -> dict[str, pa.Array]:
        return {PREDICTION: pa.array(predictions[:, 0])}

    def score(_: Outputs, losses: Outputs) -> dict[str, float]:
        known = losses[~np.isnan(losses)].astype(np.float64)  # NaN for a row without a target
        return {"eval_loss": float(known.mean())} if len(known) else {}

    return Prediction(
        table=table,
        data=data,
        collate=default_collate,
        batches=evaluation_batches(data.lengths, Budget(samples=request.limits[1])),
        model=build_model(request, *learned),
        predict_batch=recipe.predict_batch,
        widths=(1, 1),
        columns=columns_of,
        score=score if request.config.scores else None,
        notes={"model": str(request.model), "data": count_of(len(data), "row")},
    )
