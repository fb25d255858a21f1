"""Predictions of a model of sentence embeddings: a vector for each text."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from shared.contrastive.objectives import objective_of
from shared.contrastive.tuples import FLAG, load_tuples, of_columns, pack_or_pad_tuples
from shared.datasets.rows import column_of
from shared.datasets.tables import skip_incomplete
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError, count_of
from shared.plan.batches import MicroBatch, evaluation_batches
from shared.predictions.labels import have_labels
from shared.predictions.prediction import Outputs, Prediction, build_model, read_rows
from shared.predictions.request import Request
from shared.pretrained.tokenizers import load_tokenizer

EMBEDDING = "embedding_"  # followed by the name of a text column


def predict_embeddings(accelerator: Any, request: Request) -> Prediction:
    """The prediction of --text_column_names of FILE, or of the run's validation data.

    Raises:
        UserError: the model or the rows cannot be used.
    """
    config, tokenizer = request.config, load_tokenizer(str(request.model))
    model = build_model(request, tokenizer)
    dim: int = model.config.hidden_size
    table, found = read_input(request)
    score_column = config.label_column_name
    if score_column and not have_labels(request, table, (score_column,)).any():
        config = replace(config, label_column_name=None)
    data, objective = request.recipe.encode(of_columns(config, found), table, tokenizer), objective_of(request.config)
    columns = data.names
    model = adapt_to_device(accelerator, config, model)
    collate, how = pack_or_pad_tuples(model, data, tokenizer, accelerator, config)
    sizes = collate.sizes(data)
    lengths = sizes.get("padded", np.asarray)(sizes["lengths"].astype(np.int64))
    pair = config.text_column_names[:2]

    def predict_batch(model: Any, micro_batch: MicroBatch, batch: dict[str, Any]) -> list[Tensor]:
        """The embeddings [rows, dimensions] of each column."""
        del batch["targets"]
        return [*request.recipe.predict_batch(model, micro_batch, batch).view(len(columns), -1, dim)]

    def columns_of(_: pa.Table, *vectors: Outputs) -> dict[str, pa.Array]:
        named = zip(columns, vectors, strict=True)
        return {EMBEDDING + name: pa.FixedSizeListArray.from_arrays(pa.array(v.ravel()), dim) for name, v in named}

    def score(*vectors: Outputs) -> dict[str, float]:
        """The scores of the recipe's evaluation."""
        of_pair = (vectors[columns.index(name)] for name in pair)
        embeddings = [torch.from_numpy(np.ascontiguousarray(each)).to(accelerator.device) for each in of_pair]
        return objective.evaluate(None, embeddings, data)

    can_score = config.scores and len(pair) == 2 and {*pair} <= {*columns} and score_column == config.label_column_name
    texts = f"{count_of(len(data), 'row')} with the texts {', '.join(columns)}"
    return Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=evaluation_batches(lengths, *request.limits, packed=collate.of_texts.packed),
        model=model,
        predict_batch=predict_batch,
        widths=(dim,) * len(columns),
        columns=columns_of,
        score=score if can_score else None,
        labels="pairs with scores" if score_column else "pairs",
        has_loss=False,
        notes={"model": f"{request.model}: embeddings of {dim} dimensions", "data": f"{texts}{how}"},
    )


def read_input(request: Request) -> tuple[pa.Table, tuple[str, ...]]:
    """The rows to predict, and their text columns: those of the settings that the input has.

    Raises:
        UserError: the rows cannot be read, or they have no text column, or not all that --text_column_names names.
    """
    config, names = request.config, request.config.text_column_names
    if request.file is None:
        return load_tuples(config)[1], names[:2]
    if len({*names}) < len(names):
        raise UserError(f"{FLAG} {' '.join(names)}: name each column once")
    table = read_rows(request)
    found = tuple(name for name in names if name in table.column_names)
    for name in names if "text_column_names" in request.given or not found else found:
        column_of(table, name, FLAG)
    return skip_incomplete(table, found) if config.skip_incomplete_rows else table, found
