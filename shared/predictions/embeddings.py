"""Predictions of a model of sentence embeddings: a vector for each text."""

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from shared.contrastive import retrieval
from shared.contrastive.tuples import FLAG, load_tuples, pack_or_pad_tuples, tokenize_tuples
from shared.datasets.rows import column_of
from shared.datasets.tables import read_file, skip_incomplete
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError, count_of
from shared.plan.batches import MicroBatch, evaluation_batches
from shared.predictions.prediction import Outputs, Prediction, build_model
from shared.predictions.request import Request
from shared.pretrained.tokenizers import load_tokenizer

EMBEDDING = "embedding_"  # followed by the name of a text column


def predict_embeddings(accelerator: Any, request: Request) -> Prediction:
    """The prediction of --text_column_names of the input, or of the run's validation data.

    Raises:
        UserError: the model or the input cannot be used.
    """
    config, tokenizer = request.config, load_tokenizer(str(request.model))
    model = build_model(request, tokenizer)
    dim: int = model.config.hidden_size
    table, columns = read_input(request)
    data = tokenize_tuples(table, columns, tokenizer, config.max_length)
    model = adapt_to_device(accelerator, config, model)
    collate, how = pack_or_pad_tuples(model, data, tokenizer, accelerator, config)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    sizes = collate.sizes(data)
    lengths = sizes.get("padded", np.asarray)(sizes["lengths"].astype(np.int64))

    def forward(micro_batch: MicroBatch, batch: dict[str, Any]) -> Tensor:
        """The embeddings of the texts of each row, one after the other: [rows, columns x dim]."""
        del batch["digests"]
        embeddings = request.recipe.predict_batch(model, micro_batch, batch)
        return embeddings.view(len(columns), -1, dim).transpose(0, 1).flatten(1)

    def embeddings_of(outputs: Outputs, name: str) -> Outputs:
        """The embeddings [n, dim] of the texts in one column."""
        first = columns.index(name) * dim
        return np.ascontiguousarray(outputs[:, first : first + dim])

    def columns_of(_: pa.Table, outputs: Outputs) -> dict[str, pa.Array]:
        vectors = {name: pa.array(embeddings_of(outputs, name).ravel()) for name in columns}
        return {EMBEDDING + name: pa.FixedSizeListArray.from_arrays(each, dim) for name, each in vectors.items()}

    def score(outputs: Outputs) -> dict[str, float]:
        """The scores of the recipe's evaluation: each anchor searches its positive among all positives."""
        found = [torch.from_numpy(embeddings_of(outputs, name)).to(accelerator.device) for name in pair]
        task = retrieval.Task.of_digests(*(data.digests_of(columns.index(name)) for name in pair))
        dims = config.matryoshka_dims or ()
        scores = retrieval.evaluate(None, found[0], found[1], task, config.temperature, dims)
        return {f"eval_{name}": value for name, value in scores.items()}

    pair = config.text_column_names[:2]
    are_pairs = len(pair) == 2 and {*pair} <= {*columns}
    scored, why = (
        request.config.scores and are_pairs,
        "because there are no pairs" if request.config.scores else "as requested",
    )
    texts = f"{count_of(len(data), 'row')} with the texts {', '.join(columns)}"
    notes = {"model": f"{request.model}: embeddings of {dim} dimensions", "data": f"{texts}{how}"}
    return Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=evaluation_batches(lengths, *request.limits, packed=collate.of_texts.packed),
        forward=forward,
        width=len(columns) * dim,
        columns=columns_of,
        score=score if scored else None,
        has_loss=False,
        notes=notes if scored else notes | {"scores": f"none, {why}"},
    )


def read_input(request: Request) -> tuple[pa.Table, tuple[str, ...]]:
    """The rows to predict, and their text columns: those of the settings that the input has.

    Raises:
        UserError: the rows cannot be read, or they have no text column, or not all that --text_column_names names.
    """
    config, names = request.config, request.config.text_column_names
    if request.file is None:
        return load_tuples(config, names)[1], names[:2]
    if len({*names}) < len(names):
        raise UserError(f"{FLAG} {' '.join(names)}: name each column once")
    table = read_file(request.file, "FILE", config.csv_delimiter)
    found = tuple(name for name in names if name in table.column_names)
    for name in names if "text_column_names" in request.given or not found else found:
        column_of(table, name, FLAG)
    if config.skip_incomplete_rows:
        table = skip_incomplete(table, found)
    return table, found
