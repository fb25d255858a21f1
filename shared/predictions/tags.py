"""Predictions of a model of token classification: the tag of each word, and the entities of texts."""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from shared.datasets.rows import ROW_COLUMN, blocks_of, is_text, named, numbered, source_of, with_content
from shared.datasets.tables import skip_incomplete
from shared.encoders.packing import pack_or_pad
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError, count_of
from shared.plan.batches import MicroBatch
from shared.predictions.labels import encoded, have_labels, with_targets
from shared.predictions.prediction import PREDICTION, Ints, Mask, Outputs, Prediction, build_model
from shared.predictions.request import Request
from shared.pretrained.from_pretrained import stored_names
from shared.pretrained.tokenizers import load_tokenizer
from shared.tagging.pieces import begin_words_with_a_space
from shared.tagging.tagged_texts import (
    LISTS,
    TEXT_FLAG,
    have_words,
    load_tagged,
    places_of_words,
    read_files,
    words_and_tags,
    words_of,
)
from shared.tagging.tags import TAGS, WORDS, Tags, begins_of, sizes_of, tagging_scores

PROBABILITY = "probability"  # of the tag of each word
WORDS_OF_TEXT, ENTITIES = "words", "entities"  # of a row with a text


def predict_tags(accelerator: Any, request: Request) -> Prediction:
    """The prediction of --text_column_name of the input, or of the run's validation data.

    Raises:
        UserError: the model, the input or its tags cannot be used.
    """
    config, folder = request.config, str(request.model)
    tokenizer, tags = begin_words_with_a_space(load_tokenizer(folder)), Tags(stored_names(folder))
    model = build_model(request, tags, tokenizer)
    columns = (config.text_column_name, config.label_column_name) if request.file else (WORDS, TAGS)
    table, words = read_words(request, columns)
    targets, scored = tag_targets(request, tags, columns, table, words)
    bounds = np.append(0, np.cumsum(sizes_of(words)))
    of_words = named(pa.table({WORDS: words}), source_of(table))
    data = request.call("encode", config, of_words, with_targets(tags, targets), tokenizer)
    numbers = data.pieces.words
    model = adapt_to_device(accelerator, config, model)
    collate, how = pack_or_pad(model, data, tokenizer, accelerator, config)

    def predict_batch(model: Any, micro_batch: MicroBatch, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The tag of each own word of the windows, its loss, and its probability, [words] each."""
        predicted, losses, logits = request.call("predict_batch", model, micro_batch, batch)
        return predicted, losses, logits.float().softmax(1).gather(1, predicted[:, None])

    def score(predicted: Outputs, losses: Outputs, _: Outputs) -> dict[str, float]:
        found = data.tags_of_all(predicted[numbers, 0].astype(int), tags.outside)
        scores = tagging_scores(tags, found[scored], targets[scored], data.begins[scored])
        loss = losses[numbers[scored[numbers]]].astype(np.float64).mean()
        return {"eval_loss": float(loss)} | {f"eval_{name}": value for name, value in scores.items()}

    counts = (
        f"{count_of(table.num_rows, 'row')}, {count_of(int(bounds[-1]), 'word')} in {count_of(len(data), 'window')}"
    )
    return Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=request.batches(data.lengths, collate.padded_lengths, collate.packed),
        model=model,
        predict_batch=predict_batch,
        widths=(1, 1, 1),
        columns=lambda block, *outputs: tag_columns(tags, block[columns[0]].combine_chunks(), outputs[0], outputs[2]),
        score=score if scored.any() else None,
        bounds=bounds,
        outputs_of=lambda samples: numbers[data.words_of(samples)],
        notes={"model": f"{folder}: {tags}", "data": f"{counts}; {how}"},
    )


def read_words(request: Request, columns: tuple[str, str]) -> tuple[pa.Table, pa.LargeListArray]:
    """The rows to predict and their words.

    Raises:
        UserError: the rows cannot be read, or have no words.
    """
    if request.file is None:
        table = load_tagged(request.config)[1]
        return table, table[WORDS].combine_chunks()
    table = read_files([request.file], "FILE", untagged=True)
    if request.config.skip_incomplete_rows:
        table = skip_incomplete(table, columns[:1])
    # In blocks, because more than 2 GiB of `string` cannot be joined. Words and tags are `large_string`.
    words = pa.chunked_array((words_of(block, columns[0]) for block in blocks_of(table)), LISTS).combine_chunks()
    if not have_words(words).any():
        raise UserError(f"{source_of(table)} has no words in {columns[0]}: use the column of the words as {TEXT_FLAG}")
    return table, words


def tag_targets(
    request: Request, tags: Tags, columns: tuple[str, str], table: pa.Table, words: pa.LargeListArray
) -> tuple[Ints, Mask]:
    """The number of the tag of each word, 0 if there is none, and whether it is scored: see `have_labels`.

    Raises:
        UserError: a tag is unknown to the model, a row has not one tag for each word, or --label_column_name names no
            column.
    """
    labeled, sizes = have_words(words) & have_labels(request, table, columns[1:]), sizes_of(words)
    targets, scored = np.zeros(sizes.sum(), np.int64), labeled.repeat(sizes)

    def encode(part: pa.Table) -> Ints:
        found = pa.chunked_array((words_and_tags(block, *columns)[1] for block in blocks_of(part)), LISTS)
        with_rows = pa.table({TAGS: found, ROW_COLUMN: numbered(part)[ROW_COLUMN]})
        return tags.encode(with_content(with_rows.replace_schema_metadata(part.schema.metadata), None))

    if labeled.any():
        targets[scored] = encoded(encode, table, labeled)
    return targets, scored


def tag_columns(tags: Tags, texts: pa.Array, predicted: Outputs, shares: Outputs) -> dict[str, pa.Array]:
    """The columns of the predictions for rows of words or texts, from the tags of their words and the probabilities.

    A word without tokens has the tag O, or null if the model has no such tag, and no probability.
    """
    from_texts = is_text(texts.type)
    places = [places_of_words(text) for text in texts.to_pylist()] if from_texts else []
    bounds = np.append(0, np.cumsum(list(map(len, places)) if from_texts else sizes_of(texts))).astype(np.int32)
    known = shares[:, 0] > 0
    numbers = np.where(known, predicted[:, 0].astype(int), tags.outside)

    def lists(values: pa.Array, ends: NDArray[np.int32] = bounds) -> pa.ListArray:
        return pa.ListArray.from_arrays(pa.array(ends), values)

    names = pa.array(tags.names, pa.string()).take(pa.array(numbers, mask=numbers < 0))
    of_words = {PREDICTION: lists(names), PROBABILITY: lists(pa.array(shares[:, 0], mask=~known))}
    if not from_texts:
        return of_words
    words = [text[slice(*place)] for text, row in zip(texts.to_pylist(), places, strict=True) for place in row]
    spans = np.array([span for row in places for span in row], np.int64).reshape(-1, 2)
    first, last, kind = tags.entities(numbers, begins_of(np.diff(bounds)))
    kinds = pa.array(tags.kinds_of_entities, pa.string()).take(pa.array(kind))
    fields = {"start": spans[first, 0], "end": spans[last, 1], "label": kinds}
    entities = pa.StructArray.from_arrays([*map(pa.array, fields.values())], names=[*fields])
    ends = np.searchsorted(first, bounds).astype(np.int32)
    return {WORDS_OF_TEXT: lists(pa.array(words, pa.string())), **of_words, ENTITIES: lists(entities, ends)}
