"""Predictions of a model of sentence embeddings: a vector for each text."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from shared.contrastive.losses import objective_of
from shared.contrastive.tuples import TextTuples, corpus_of, load_tuples, of_columns, pack_or_pad_tuples
from shared.datasets.rows import decided
from shared.datasets.tables import skip_incomplete
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError, count_of
from shared.plan.batches import MicroBatch
from shared.plan.loading import feed
from shared.predictions.labels import have_labels
from shared.predictions.prediction import Outputs, Prediction, build_model, read_rows
from shared.predictions.request import Request
from shared.pretrained.tokenizers import load_tokenizer
from shared.text.tokenized import TokenizedText

EMBEDDING = "embedding_"  # followed by the name of a text column


def predict_embeddings(accelerator: Any, request: Request) -> Prediction:
    """The prediction of --text_column_names of FILE, or of the run's validation data.

    Raises:
        UserError: the model or the rows cannot be used.
    """
    config, tokenizer = request.config, load_tokenizer(str(request.model))
    model = build_model(request, tokenizer)
    dim: int = model.config.hidden_size
    table, found = read_texts(request)
    data = encode(request, of_columns(config, found), table, tokenizer)
    objective = getattr(request.recipe, "objective_of", objective_of)(config)
    columns = data.names
    model = adapt_to_device(accelerator, config, model)
    collate, how = pack_or_pad_tuples(model, data, tokenizer, accelerator, config)
    pair = config.text_column_names[:2]

    def predict_batch(model: Any, micro_batch: MicroBatch, batch: dict[str, Any]) -> list[Tensor]:
        """The embeddings [rows, dimensions] of each column."""
        del batch["labels"]
        return [*request.call("predict_batch", model, micro_batch, batch).view(len(columns), -1, dim)]

    def columns_of(_: pa.Table, *vectors: Outputs) -> dict[str, pa.Array]:
        named = zip(columns, vectors, strict=True)
        return {EMBEDDING + name: pa.FixedSizeListArray.from_arrays(pa.array(v.ravel()), dim) for name, v in named}

    def score(*vectors: Outputs) -> dict[str, float]:
        of_pair = TextTuples(data.columns[:2], pair, data.scores, data.corpus)
        embeddings = [torch.tensor(each, device=accelerator.device) for each in vectors[:2]]
        embeddings += [embed(request, prediction.model, each, collate, accelerator.device) for each in data.corpus]
        return objective.evaluate(None, embeddings, of_pair)

    can_score = config.scores and len(pair) == 2 and pair == tuple(columns[:2])
    can_score = can_score and (not config.label_column_name or data.scores is not None)
    texts = f"{count_of(len(data), 'row')} with the texts {', '.join(columns)}"
    prediction = Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=request.batches(**data.sizes(collate)),
        model=model,
        predict_batch=predict_batch,
        widths=(dim,) * len(columns),
        columns=columns_of,
        score=score if can_score else None,
        has_loss=False,
        notes={"model": f"{request.model}: embeddings of {dim} dimensions", "data": f"{texts}; {how}"},
    )
    return prediction


def read_texts(request: Request) -> tuple[pa.Table, tuple[str, ...]]:
    """The rows to predict, and their text columns: those of the settings that the input has.

    Raises:
        UserError: the rows cannot be read.
    """
    config, names = request.config, request.config.text_column_names
    if request.file is None:
        return load_tuples(config)[1], names[:2]
    table = read_rows(request)
    known = tuple(name for name in names if name in table.column_names)
    found = names if "text_column_names" in request.given else known or names  # `encode` refuses a missing column
    if config.skip_incomplete_rows:
        score, needed = config.label_column_name, found
        if score and have_labels(request, table, (score,)).any():
            table, needed = decided(table, score, "regression"), (*found, score)
        table = skip_incomplete(table, needed)
    return table, found


def encode(request: Request, config: Any, table: pa.Table, tokenizer: Any) -> TextTuples:
    """The texts of the input, their scores if it has any, and the corpus of the run or of --corpus_file.

    Raises:
        UserError: the rows or the corpus cannot be used.
    """
    if config.label_column_name and not have_labels(request, table, (config.label_column_name,)).any():
        config = replace(config, label_column_name=None)
    if config.label_column_name and "corpus_file" in request.given:
        raise UserError("--corpus_file: pairs with scores search no texts: leave it out")
    data: TextTuples = request.call("encode", config, table, tokenizer)
    if request.file is None or "corpus_file" in request.given:
        return data.with_corpus(*(request.call("encode", *part, tokenizer) for part in corpus_of(request.config)))
    return data


@torch.inference_mode()
def embed(request: Request, model: Any, texts: TokenizedText, collate: Any, device: Any) -> Tensor:
    """The embeddings of all texts, [texts, dimensions]; this process computes them alone."""
    samples, rows = [], []
    batches = request.batches(texts.lengths, collate.padded_lengths, collate.packed)
    for micro_batch, batch in feed(batches, texts, collate, device):
        samples.append(micro_batch.samples)
        rows.append(request.call("predict_batch", model, micro_batch, batch))
    return torch.cat(rows)[torch.from_numpy(np.concatenate(samples).argsort()).to(device)]
