"""Predictions of a text classifier or regression model, for texts and text pairs."""

from functools import partial
from typing import Any

import numpy as np

from shared.datasets.labels import load_labeled
from shared.encoders.packed_texts import unpack_before_head
from shared.encoders.packing import pack_or_pad
from shared.encoders.padding import pad_rows
from shared.encoders.text_models import adapt_to_device
from shared.errors import count_of
from shared.losses.losses import Scale
from shared.plan.batches import Budget, evaluation_batches
from shared.predictions.labels import label_outputs, labels_of_model, targets_of, with_targets
from shared.predictions.prediction import Prediction, build_model, load_data, read_rows
from shared.predictions.request import Request
from shared.pretrained.tokenizers import load_tokenizer


def predict_texts(accelerator: Any, request: Request) -> Prediction:
    """The prediction of --text_column_names of FILE, or of the run's validation data.

    Raises:
        UserError: the model, the rows or their labels cannot be used.
    """
    config, recipe = request.config, request.recipe
    if request.is_own_model:
        _, _, labels, tokenizer = load_data(request)
    else:
        labels, tokenizer = labels_of_model(request), load_tokenizer(str(request.model))
    model = build_model(request, labels, tokenizer)
    known = labels
    if request.file is None:
        _, table, found = load_labeled(config)
        known = found if found.names == labels.names else labels  # the run's data say which values are the names
    else:
        table = read_rows(request, config.text_column_names, "--text_column_names")
    targets, scored = targets_of(request, known, table)
    data = recipe.encode(config, table, with_targets(labels, targets), tokenizer)
    if hasattr(config, "packing"):
        model = adapt_to_device(accelerator, config, model)
        collate, described = pack_or_pad(model, data, tokenizer, accelerator, config, unpack_before_head)
        how = f"; {described}"
    else:
        collate, how = pad_rows(model, data, tokenizer, config)
    lengths = collate.padded_lengths(data.lengths.astype(np.int64))
    return Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=evaluation_batches(lengths, Budget(*request.limits, collate.packed)),
        model=model,
        predict_batch=partial(recipe.predict_batch, Scale(labels)),
        **label_outputs(request, labels, targets, scored, f"{count_of(len(data), 'text')}{how}"),
    )
