"""Predictions of a text classifier or regression model, for texts and text pairs."""

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from shared.datasets.labels import Labels, load_labeled
from shared.datasets.rows import column_of
from shared.datasets.tables import read_file, skip_incomplete
from shared.encoders.packed_texts import pack_or_pad_texts
from shared.encoders.padding import pad_rows
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError, count_of
from shared.losses.regression import Scale
from shared.plan.batches import MicroBatch, evaluation_batches
from shared.predictions.labels import LabelOutputs, Mask, labels_of_model, targets_of
from shared.predictions.prediction import Prediction, build_model
from shared.predictions.request import Request
from shared.pretrained.tokenizers import load_tokenizer
from shared.text.tokenized import tokenize


def predict_texts(accelerator: Any, request: Request) -> Prediction:
    """The prediction of --text_column_names of the input, or of the run's validation data.

    Raises:
        UserError: the model, the input or its labels cannot be used.
    """
    config = request.config
    if request.is_own_model:
        labels, tokenizer = learned_from_data(request)
    else:
        labels, tokenizer = labels_of_model(request), load_tokenizer(str(request.model))
    model, outputs = build_model(request, labels, tokenizer), LabelOutputs(request, labels)
    table, targets, scored = read_input(request, labels)
    texts = tokenize(table, config.text_column_names, tokenizer, config.max_length)
    data = texts.with_targets(targets, labels.names)
    score, notes = outputs.scorer(targets, scored)
    if hasattr(config, "packing"):
        model = adapt_to_device(accelerator, config, model)
        collate, how = pack_or_pad_texts(model, data, tokenizer, accelerator, config)
    else:
        collate, how = pad_rows(model, data, tokenizer, config)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    predict_batch = partial(request.recipe.predict_batch, Scale(labels), model)
    lengths = collate.padded_lengths(data.lengths.astype(np.int64))

    def forward(micro_batch: MicroBatch, batch: dict[str, Any]) -> Tensor:
        return outputs.of_batch(*predict_batch(micro_batch, batch))

    return Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=evaluation_batches(lengths, *request.limits, packed=collate.packed),
        forward=forward,
        width=outputs.width,
        columns=outputs.columns,
        score=score,
        notes={"model": f"{request.model}: {labels}", "data": f"{count_of(len(data), 'text')}{how}"} | notes,
    )


def learned_from_data(request: Request) -> tuple[Labels, Any]:
    """The labels and the tokenizer of a model without a config, from the data of its run.

    Raises:
        UserError: the data have changed since the run.
    """
    train, validation, labels, tokenizer = request.recipe.load_data(request.config)
    if request.digests_of_run not in ([], [train.digest(), validation.digest()]):
        raise UserError(
            f"{request.run}: the data of the run, from which its labels are read, have changed: restore them"
        )
    return labels, tokenizer


def read_input(request: Request, labels: Labels) -> tuple[pa.Table, NDArray[Any], Mask]:
    """The rows to predict, their targets, and which of them are scored.

    Raises:
        UserError: the rows cannot be read, or their labels are not those of the model.
    """
    config = request.config
    if request.file is None:
        _, table, found = load_labeled(config)
        if found.kind != labels.kind or found.names != labels.names:
            raise UserError(f"the run's data now have other labels ({found}) than its model ({labels}): give a FILE")
        return table, found.encode(table), np.full(table.num_rows, config.scores)
    table = read_file(request.file, "FILE", config.csv_delimiter)
    for name in config.text_column_names:
        column_of(table, name, "--text_column_names")
    if config.skip_incomplete_rows:
        table = skip_incomplete(table, config.text_column_names)
    return table, *targets_of(request, labels, table)
