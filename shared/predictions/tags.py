"""Predictions of a model of token classification: the tag of each word, and the entities of texts."""

from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.datasets.rows import CONTENT_KEY, ROW_COLUMN, column_of, is_text, missing, named, numbered, source_of
from shared.datasets.tables import skip_incomplete
from shared.encoders.packing import pack_or_pad
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError, count_of, say
from shared.plan.batches import MicroBatch, evaluation_batches
from shared.predictions.labels import PREDICTION, Mask, encoded, has_labels
from shared.predictions.prediction import Ints, Outputs, Prediction, build_model
from shared.predictions.request import Request
from shared.pretrained.from_pretrained import stored_names
from shared.pretrained.tokenizers import load_tokenizer
from shared.tagging.pieces import begin_words_with_a_space, cut_words
from shared.tagging.scores import tagging_scores
from shared.tagging.tagged_texts import (
    TAG_FLAG,
    TEXT_FLAG,
    WORD,
    have_words,
    load_tagged,
    read_files,
    words_and_tags,
    words_of,
)
from shared.tagging.tags import TAGS, WORDS, Tags
from shared.tagging.text_blocks import begins_of, sizes_of
from shared.tagging.windows import TaggedWords
from shared.text.token_files import special_tokens_around

PROBABILITY = "probability"  # of the tag of each word
WORDS_OF_TEXT, ENTITIES = "words", "entities"  # of a row with a text
TAG, SHARE, LOSS = range(3)  # the outputs of a word: number and probability of the predicted tag, loss of the true one


def predict_tags(accelerator: Any, request: Request) -> Prediction:
    """The prediction of --text_column_name of the input, or of the run's validation data.

    Raises:
        UserError: the model, the input or its tags cannot be used.
    """
    config, folder = request.config, str(request.model)
    tokenizer, tags = begin_words_with_a_space(load_tokenizer(folder)), Tags(stored_names(folder))
    model = build_model(request, tags, tokenizer)
    table, words, targets, scored = read_input(request, tags)
    bounds = np.append(0, np.cumsum(sizes_of(words)))
    pieces = cut_words(named(pa.table({WORDS: words}), source_of(table)), tokenizer)
    data = TaggedWords(pieces, targets, config.max_length, config.stride, special_tokens_around(tokenizer))
    model = adapt_to_device(accelerator, config, model)
    collate, how = pack_or_pad(model, data, tokenizer, accelerator, config)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    lengths = collate.padded_lengths(data.lengths)

    def forward(micro_batch: MicroBatch, batch: dict[str, Any]) -> Tensor:
        """TAG, SHARE and LOSS of the own words of the windows, [words, 3]."""
        predicted, losses, logits = request.recipe.predict_batch(model, micro_batch, batch)
        shares = logits.float().softmax(1).gather(1, predicted[:, None])
        return torch.cat([predicted[:, None].float(), shares, losses[:, None].float()], dim=1)

    def score(outputs: Outputs) -> dict[str, float]:
        """The scores of the recipe's evaluation, of the words with tags."""
        predicted = data.tags_of_all(outputs[pieces.words, TAG].astype(int), tags.outside)
        scores = tagging_scores(tags, predicted[scored], targets[scored], data.begins[scored])
        losses = outputs[pieces.words[scored[pieces.words]], LOSS]
        return {"eval_loss": float(losses.astype(np.float64).mean())} | {f"eval_{n}": v for n, v in scores.items()}

    counts = (
        f"{count_of(table.num_rows, 'row')}, {count_of(int(bounds[-1]), 'word')} in {count_of(len(data), 'window')}"
    )
    notes = {"model": f"{folder}: {tags}", "data": f"{counts}; {how}"}
    if not scored.any():
        notes["scores"] = "none, because there are no tags" if request.config.scores else "none, as requested"
    return Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=evaluation_batches(lengths, *request.limits, packed=collate.packed),
        forward=forward,
        width=3,
        columns=lambda block, outputs: columns_of(tags, texts_in(block, request), outputs),
        score=score if scored.any() else None,
        bounds=bounds,
        outputs_of=lambda samples: pieces.words[data.words_of(samples)],
        notes=notes,
    )


def texts_in(table: pa.Table, request: Request) -> pa.Array:
    """The column of the words or texts."""
    name = WORDS if request.file is None else request.config.text_column_name
    return column_of(table, name, TEXT_FLAG).combine_chunks()


def read_input(request: Request, tags: Tags) -> tuple[pa.Table, pa.LargeListArray, Ints, Mask]:
    """The rows to predict, their words, and the number of the tag of each word [words], and whether it is scored.

    Raises:
        UserError: the rows cannot be read, have no words, or their tags are not those of the model.
    """
    config = request.config
    if request.file is None:
        _, table, found = load_tagged(config)
        if found.names != tags.names:
            raise UserError(f"the run's data now have other tags ({found}) than its model ({tags}): give a FILE")
        targets = tags.encode(table)
        return table, table[WORDS].combine_chunks(), targets, np.full(len(targets), config.scores)
    columns = config.text_column_name, config.label_column_name
    table = read_files([request.file], "FILE", untagged=True)
    if config.skip_incomplete_rows:
        table = skip_incomplete(table, columns[:1])
    of_rows = words_of(table, columns[0])
    if not have_words(of_rows).any():
        raise UserError(f"{source_of(table)} has no words in {columns[0]}: use the column of the words as {TEXT_FLAG}")
    return table, of_rows, *targets_of(table, of_rows, tags, request)


def targets_of(table: pa.Table, words: pa.LargeListArray, tags: Tags, request: Request) -> tuple[Ints, Mask]:
    """The number of the tag of each word, 0 if there is none, and whether it is scored: see `has_labels`.

    Raises:
        UserError: a tag is unknown to the model, a row has not one tag for each word, or --label_column_name names no
            column.
    """
    column, sizes = request.config.label_column_name, sizes_of(words)
    targets, none = np.zeros(sizes.sum(), np.int64), np.zeros(sizes.sum(), bool)
    if not has_labels(request, table, (column,)):
        return targets, none
    column_of(table, column, TAG_FLAG)
    full, gaps = have_words(words), missing(table, column)
    if not (labeled := full & ~gaps).any():
        return targets, none
    if without := int((full & gaps).sum()):
        say(f"{without:,} of {full.sum():,} rows have no tags: the scores are those of the other rows")

    def encode(part: pa.Table) -> Ints:
        _, found, _ = words_and_tags(part, request.config.text_column_name, column)
        metadata = {**(part.schema.metadata or {}), CONTENT_KEY: b""}  # the columns are others
        return tags.encode(pa.table({TAGS: found, ROW_COLUMN: part[ROW_COLUMN]}).replace_schema_metadata(metadata))

    scored = labeled.repeat(sizes)
    targets[scored] = encoded(encode, numbered(table).filter(pa.array(labeled)))
    return targets, scored


def columns_of(tags: Tags, texts: pa.Array, outputs: Outputs) -> dict[str, pa.Array]:
    """The columns of the predictions for rows of words or texts, from the outputs of their words.

    A word without tokens has the tag O, or null if the model has no such tag, and no probability.
    """
    from_texts = is_text(texts.type)
    places = [[match.span() for match in WORD.finditer(text)] for text in texts.to_pylist()] if from_texts else []
    bounds = np.append(0, np.cumsum(list(map(len, places)) if from_texts else sizes_of(texts))).astype(np.int32)
    known = outputs[:, SHARE] > 0
    numbers = np.where(known, outputs[:, TAG].astype(int), tags.outside)

    def lists(values: pa.Array, ends: NDArray[np.int32] = bounds) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(ends), values)

    names = pa.array(tags.names, pa.string()).take(pa.array(numbers, mask=numbers < 0))
    of_words = {PREDICTION: lists(names), PROBABILITY: lists(pa.array(outputs[:, SHARE], mask=~known))}
    if not from_texts:
        return of_words
    words = [word for text in texts.to_pylist() for word in WORD.findall(text)]
    spans = np.array([span for row in places for span in row], np.int64).reshape(-1, 2)
    found = tags.entities(numbers, begins_of(np.diff(bounds)))
    kinds = pa.array(tags.kinds_of_entities, pa.string()).take(pa.array(found.kind))
    fields = {"start": spans[found.first, 0], "end": spans[found.last, 1], "label": kinds}
    entities = pa.StructArray.from_arrays([*map(pa.array, fields.values())], names=[*fields])
    ends = np.searchsorted(found.first, bounds).astype(np.int32)
    return {WORDS_OF_TEXT: lists(pa.array(words, pa.string())), **of_words, ENTITIES: lists(entities, ends)}
