"""Predictions of a model of token classification: the tag of each word, and the entities of texts."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shared.datasets.rows import CONTENT_KEY, ROW_COLUMN, column_of, is_text, missing, named, numbered, source_of
from shared.datasets.tables import skip_incomplete
from shared.encoders.masked_head import predict_only_masked
from shared.encoders.packing import pack_or_pad
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError, count_of, say
from shared.plan.batches import evaluation_batches
from shared.predictions.prediction import Ints, Outputs, OutputsOfWords, Prediction, load_trained
from shared.predictions.settings import TagSettings
from shared.pretrained.from_pretrained import stored_names
from shared.pretrained.tokenizers import load_tokenizer, share_padding
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
from shared.text.tokenized import check_max_length, check_vocabulary

PREDICTION, PROBABILITY = "prediction", "probability"  # of each word
WORDS_OF_TEXT, ENTITIES = "words", "entities"  # of a row with a text
TAG, SHARE, LOSS = range(3)  # the outputs of a word: number and probability of the predicted tag, loss of the true one


@dataclass(frozen=True)
class Words:
    """The words of the input and the tags that are known, all rows one after the other."""

    of_rows: pa.LargeListArray
    """[rows] the words of each row."""
    tags: Ints
    """[words] the number of the tag in the input, 0 if there is none."""
    scored: NDArray[np.bool_]
    """[words] whether a word has a tag in the input."""

    @property
    def bounds(self) -> Ints:
        """int64 [rows + 1]: where the words of each row begin, and their total number."""
        return np.append(0, np.cumsum(sizes_of(self.of_rows)))


def predict_tags(accelerator: Any, settings: TagSettings) -> Prediction:
    """The prediction of --text_column_name of the input, or of the run's validation data.

    Raises:
        UserError: the model, the input or its tags cannot be used.
    """
    folder = str(settings.model_name_or_path)
    tokenizer = begin_words_with_a_space(load_tokenizer(folder))
    model = load_trained("AutoModelForTokenClassification", folder)
    share_padding(tokenizer, model)
    check_vocabulary(tokenizer, model.config.vocab_size)
    check_max_length(settings.max_length, model.config)
    predict_only_masked(model)  # here: only first pieces of words
    tags = Tags(stored_names(folder))
    table, text_column, words = read_input(settings, tags)
    source, bounds = source_of(table), words.bounds
    pieces = cut_words(named(pa.table({WORDS: words.of_rows}), source), tokenizer)
    window = settings.max_length, settings.stride, special_tokens_around(tokenizer)
    data = TaggedWords(pieces, words.tags, *window)
    model = adapt_to_device(accelerator, settings, model)
    collate, how = pack_or_pad(model, data, tokenizer, accelerator, settings)
    model.to(accelerator.device)
    limits = settings.max_tokens_per_micro_batch, settings.per_device_eval_batch_size

    def forward(batch: dict[str, Any]) -> Tensor:
        """TAG, SHARE and LOSS of the own words of the windows, [words, 3]."""
        targets = batch.pop("labels")
        with accelerator.autocast():
            logits = model(**batch).logits.float()
        predicted = logits.argmax(1, keepdim=True)
        losses = F.cross_entropy(logits, targets, reduction="none")
        return torch.cat([predicted.float(), logits.softmax(1).gather(1, predicted), losses[:, None]], dim=1)

    def score(outputs: Outputs) -> dict[str, float]:
        """The scores of the recipe's evaluation, of the words with tags."""
        predicted = data.tags_of_all(outputs[pieces.words, TAG].astype(int), tags.outside)
        scored = words.scored
        scores = tagging_scores(tags, predicted[scored], words.tags[scored], data.begins[scored])
        losses = outputs[pieces.words[scored[pieces.words]], LOSS]
        return {"eval_loss": float(losses.astype(np.float64).mean())} | {f"eval_{n}": v for n, v in scores.items()}

    has_scores, notes = bool(words.scored.any()), {}
    if not has_scores:
        notes["scores"] = "none, because there are no tags" if settings.scores else "none, as requested"
    return Prediction(
        table=table.drop_columns([ROW_COLUMN]) if ROW_COLUMN in table.column_names else table,
        source=source,
        data=data,
        collate=collate,
        batches=evaluation_batches(collate.padded_lengths(data.lengths), *limits, packed=collate.packed),
        forward=forward,
        width=3,
        columns=lambda block, outputs: columns_of(
            tags, column_of(block, text_column, TEXT_FLAG).combine_chunks(), outputs
        ),
        score=score if has_scores else None,
        words=OutputsOfWords(bounds, lambda samples: pieces.words[data.words_of(samples)]),
        notes={
            "model": f"{folder}: {tags}",
            "data": f"{source}: {count_of(table.num_rows, 'row')}, {count_of(int(bounds[-1]), 'word')} in "
            f"{count_of(len(data), 'window')}; {how}",
        }
        | notes,
    )


def read_input(settings: TagSettings, tags: Tags) -> tuple[pa.Table, str, Words]:
    """The rows to predict, the column of their words or texts, and the words with the tags that are known.

    Raises:
        UserError: the rows cannot be read, have no words, or their tags are not those of the model.
    """
    if settings.input_file is None:
        _, table, found = load_tagged(settings)
        if found.names != tags.names:
            raise UserError(f"the run's data now have other tags ({found}) than its model ({tags}): give a FILE")
        targets = tags.encode(table)
        words = Words(table[WORDS].combine_chunks(), targets, np.full(len(targets), settings.scores))
        return table, WORDS, words
    columns = settings.text_column_name, settings.label_column_name
    table = read_files([settings.input_file], "FILE", untagged=True)
    if settings.skip_incomplete_rows:
        table = skip_incomplete(table, columns[:1])
    of_rows = words_of(table, columns[0])
    if not have_words(of_rows).any():
        raise UserError(f"{source_of(table)} has no words in {columns[0]}: use the column of the words as {TEXT_FLAG}")
    return table, columns[0], Words(of_rows, *targets_of(table, of_rows, tags, settings))


def targets_of(
    table: pa.Table, words: pa.LargeListArray, tags: Tags, settings: TagSettings
) -> tuple[Ints, NDArray[np.bool_]]:
    """The `tags` and `scored` of `Words`; no word is scored without a column of tags, or with --no_scores.

    Raises:
        UserError: a tag is unknown to the model, a row has not one tag for each word, or --label_column_name names no
            column.
    """
    column, sizes = settings.label_column_name, sizes_of(words)
    targets, scored = np.zeros(sizes.sum(), np.int64), np.zeros(sizes.sum(), bool)
    if not settings.scores or not (settings.labels_required or column in table.column_names):
        return targets, scored
    column_of(table, column, TAG_FLAG)
    full, gaps = have_words(words), missing(table, column)
    if not (labeled := full & ~gaps).any():
        return targets, scored
    if without := int((full & gaps).sum()):
        say(f"{without:,} of {full.sum():,} rows have no tags: the scores are those of the other rows")
    part = numbered(table).filter(pa.array(labeled))
    try:
        _, found, _ = words_and_tags(part, settings.text_column_name, column)
        metadata = {**(part.schema.metadata or {}), CONTENT_KEY: b""}  # the columns are others
        tagged = pa.table({TAGS: found, ROW_COLUMN: part[ROW_COLUMN]}).replace_schema_metadata(metadata)
        known = tags.encode(tagged)
    except UserError as error:
        raise UserError(f"{error}; or use --no_scores, to predict without scores") from None
    scored = labeled.repeat(sizes)
    targets[scored] = known
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
