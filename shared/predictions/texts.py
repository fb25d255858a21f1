"""Predictions of a text classifier or regression model, for texts and text pairs."""

from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from shared.datasets.labels import load_labeled
from shared.datasets.rows import ROW_COLUMN, column_of, source_of
from shared.datasets.tables import read_file, skip_incomplete
from shared.encoders.packed_texts import pack_or_pad_texts
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError, count_of
from shared.plan.batches import evaluation_batches
from shared.predictions.labels import Task, scorer, targets_of
from shared.predictions.prediction import Prediction, load_trained
from shared.predictions.settings import TextSettings
from shared.pretrained.from_pretrained import stored_names
from shared.pretrained.tokenizers import load_tokenizer, share_padding
from shared.text.tokenized import check_max_length, check_vocabulary, tokenize


def predict_texts(accelerator: Any, settings: TextSettings) -> Prediction:
    """The prediction of --text_column_names of the input, or of the run's validation data.

    Raises:
        UserError: the model, the input or its labels cannot be used.
    """
    folder = str(settings.model_name_or_path)
    tokenizer, model = load_tokenizer(folder), load_trained("AutoModelForSequenceClassification", folder)
    share_padding(tokenizer, model)
    check_vocabulary(tokenizer, model.config.vocab_size)
    check_max_length(settings.max_length, model.config)
    task = Task.of_model(model.config, stored_names(folder), settings)
    table, found = read_input(settings, task)
    data = tokenize(table, settings.text_column_names, tokenizer, settings.max_length)
    score, notes = scorer(task, settings, found, len(data))
    model = adapt_to_device(accelerator, settings, model)
    collate, how = pack_or_pad_texts(model, data, tokenizer, accelerator, settings)
    model.to(accelerator.device)
    lengths = collate.padded_lengths(data.lengths.astype(np.int64))
    limits = settings.max_tokens_per_micro_batch, settings.per_device_eval_batch_size

    def forward(batch: dict[str, Any]) -> Tensor:
        with accelerator.autocast():
            return model(**batch).logits.float()

    return Prediction(
        table=table.drop_columns([ROW_COLUMN]) if ROW_COLUMN in table.column_names else table,
        source=source_of(table),
        data=data,
        collate=collate,
        batches=evaluation_batches(lengths, *limits, packed=collate.packed),
        forward=forward,
        width=task.width,
        columns=lambda _, outputs: task.columns(outputs),
        score=score,
        notes={"model": f"{folder}: {task}", "data": f"{source_of(table)}: {count_of(len(data), 'text')}{how}"} | notes,
    )


def read_input(settings: TextSettings, task: Task) -> tuple[pa.Table, tuple[np.ndarray, np.ndarray] | None]:
    """The rows to predict, and the numbers and targets of those with labels; None without labels.

    Raises:
        UserError: the rows cannot be read, or their labels are not those of the model.
    """
    if settings.input_file is None:
        _, table, labels = load_labeled(settings)
        if labels.kind != task.kind or labels.names != task.names:
            raise UserError(f"the run's data now have other labels ({labels}) than its model ({task}): give a FILE")
        found = (np.arange(table.num_rows), labels.encode(table)) if settings.scores else None
        return table, found
    table = read_file(settings.input_file, "FILE", settings.csv_delimiter)
    for name in settings.text_column_names:
        column_of(table, name, "--text_column_names")
    if settings.skip_incomplete_rows:
        table = skip_incomplete(table, settings.text_column_names)
    return table, targets_of(task, table, settings)
