"""Predictions of a model of sentence embeddings: a vector for each text."""

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from torch.nn import functional as F

from shared.contrastive import retrieval
from shared.contrastive.pooling import add_pooling
from shared.contrastive.tuples import FLAG, load_tuples, pack_or_pad_tuples, tokenize_tuples
from shared.datasets.rows import ROW_COLUMN, column_of, source_of
from shared.datasets.tables import read_file, skip_incomplete
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError, count_of
from shared.plan.batches import evaluation_batches
from shared.predictions.prediction import Outputs, Prediction, load_trained
from shared.predictions.settings import EmbeddingSettings
from shared.pretrained.tokenizers import load_tokenizer, share_padding
from shared.text.tokenized import check_max_length, check_vocabulary

EMBEDDING = "embedding_"  # followed by the name of a text column
UNUSED = ("pooler.",)  # weights of an encoder that the embeddings do not use


def predict_embeddings(accelerator: Any, settings: EmbeddingSettings) -> Prediction:
    """The prediction of --text_column_names of the input, or of the run's validation data.

    Raises:
        UserError: the model or the input cannot be used.
    """
    folder = str(settings.model_name_or_path)
    tokenizer, model = load_tokenizer(folder), load_trained("AutoModel", folder, UNUSED)
    dim: int = model.config.hidden_size
    share_padding(tokenizer, model)
    check_vocabulary(tokenizer, model.config.vocab_size)
    check_max_length(settings.max_length, model.config)
    add_pooling(model, settings.pooling)
    table, columns = read_input(settings)
    data = tokenize_tuples(table, columns, tokenizer, settings.max_length)
    model = adapt_to_device(accelerator, settings, model)
    collate, how = pack_or_pad_tuples(model, data, data, tokenizer, accelerator, settings)
    model.to(accelerator.device)
    sizes = collate.sizes(data)
    lengths = sizes["lengths"].astype(np.int64)
    if "padded" in sizes:
        lengths = sizes["padded"](lengths)
    limits = settings.max_tokens_per_micro_batch, settings.per_device_eval_batch_size

    def forward(batch: dict[str, Any]) -> Tensor:
        """The embeddings of the texts of each row, one after the other: [rows, columns x dim]."""
        del batch["digests"]
        with accelerator.autocast():
            embeddings = F.normalize(model(**batch).logits.float(), dim=1)
        return embeddings.view(len(columns), -1, dim).transpose(0, 1).flatten(1)

    def embeddings_of(outputs: Outputs, name: str) -> Outputs:
        """The embeddings [n, dim] of the texts in one column."""
        first = columns.index(name) * dim
        return np.ascontiguousarray(outputs[:, first : first + dim])

    def columns_of(_: pa.Table, outputs: Outputs) -> dict[str, pa.Array]:
        return {
            EMBEDDING + name: pa.FixedSizeListArray.from_arrays(pa.array(embeddings_of(outputs, name).ravel()), dim)
            for name in columns
        }

    pair = settings.text_column_names[:2]

    def score(outputs: Outputs) -> dict[str, float]:
        """The scores of the recipe's evaluation: each anchor searches its positive among all positives."""
        found = [torch.from_numpy(embeddings_of(outputs, name)).to(accelerator.device) for name in pair]
        task = retrieval.Task.of_digests(*(data.digests_of(columns.index(name)) for name in pair))
        dims = settings.matryoshka_dims or ()
        scores = retrieval.evaluate(None, found[0], found[1], task, settings.temperature, dims)
        return {f"eval_{name}": value for name, value in scores.items()}

    scored, notes = settings.scores and len(pair) == 2 and {*pair} <= {*columns}, {}
    if not scored:
        reason = "because there are no pairs of texts" if settings.scores else "as requested"
        notes["scores"] = f"none, {reason}"
    texts = f"{count_of(len(data), 'row')} with the texts {', '.join(columns)}"
    return Prediction(
        table=table.drop_columns([ROW_COLUMN]) if ROW_COLUMN in table.column_names else table,
        source=source_of(table),
        data=data,
        collate=collate,
        batches=evaluation_batches(lengths, *limits, packed=collate.of_texts.packed),
        forward=forward,
        width=len(columns) * dim,
        columns=columns_of,
        score=score if scored else None,
        notes={
            "model": f"{folder}: embeddings of {dim} dimensions",
            "data": f"{source_of(table)}: {texts}{how}",
        }
        | notes,
    )


def read_input(settings: EmbeddingSettings) -> tuple[pa.Table, tuple[str, ...]]:
    """The rows to predict, and their text columns: those of the settings that the input has.

    Raises:
        UserError: the rows cannot be read, or they have no text column, or not all that --text_column_names names.
    """
    names = settings.text_column_names
    if settings.input_file is None:
        return load_tuples(settings, names)[1], names[:2]
    if len({*names}) < len(names):
        raise UserError(f"{FLAG} {' '.join(names)}: name each column once")
    table = read_file(settings.input_file, "FILE", settings.csv_delimiter)
    found = tuple(name for name in names if name in table.column_names)
    for name in names if settings.all_columns_required or not found else found:
        column_of(table, name, FLAG)
    if settings.skip_incomplete_rows:
        table = skip_incomplete(table, found)
    return table, found
