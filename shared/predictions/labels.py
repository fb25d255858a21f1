"""Predictions of classifiers and of regression: of texts, and for all of them, their columns, scores and labels."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from shared.datasets.label_columns import FLAG
from shared.datasets.labels import KINDS, Labels, load_labeled
from shared.datasets.readers import is_list
from shared.datasets.rows import column_of, decided, missing, numbered
from shared.encoders.packing import pack_or_pad, pad_rows, unpack_before_head
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError, count_of, say
from shared.losses.losses import Scale
from shared.metrics.task_metrics import resolve_metrics
from shared.options.data_options import MetricOptions
from shared.predictions.prediction import PREDICTION, Mask, Outputs, Prediction, build_model, load_data, read_rows
from shared.predictions.request import Request
from shared.pretrained.from_pretrained import are_placeholders, load_pretrained, stored_names
from shared.pretrained.tokenizers import load_tokenizer

PROBABILITY = "probability_"  # followed by the name of a class or label
DELIMITER = ","  # between several labels of a row in a CSV file
DTYPES = {"classification": np.int64, "multi_label": np.float32, "regression": np.float64}  # of `Labels.encode`


def predict_texts(accelerator: Any, request: Request) -> Prediction:
    """The prediction of --text_column_names of FILE, or of the run's validation data.

    Raises:
        UserError: the model, the rows or their labels cannot be used.
    """
    config = request.config
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
    data = request.call("encode", config, table, with_targets(labels, targets), tokenizer)
    if hasattr(config, "packing"):
        model = adapt_to_device(accelerator, config, model)
        collate, described = pack_or_pad(model, data, tokenizer, accelerator, config, unpack_before_head)
        how = f"; {described}"
    else:
        collate, how = pad_rows(model, data, tokenizer, config)
    return Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=request.batches(data.lengths, collate.padded_lengths, collate.packed),
        model=model,
        predict_batch=partial(request.call, "predict_batch", Scale(labels)),
        **label_outputs(request, labels, targets, scored, f"{count_of(len(data), 'text')}{how}"),
    )


def label_outputs(
    request: Request, labels: Labels, targets: NDArray[Any], scored: Mask, data: str, ranked: int | None = None
) -> dict[str, Any]:
    """The fields of a `Prediction` whose outputs are predictions, losses and logits: widths, columns, score, notes.

    `targets` [rows] have no meaning where a row is not `scored`, because it has no label. An image classifier gives the
    `ranked` most likely classes, the first one first. `data` describes the data.

    Raises:
        UserError: see `resolve_metrics`.
    """
    predicted = labels.num_labels if labels.kind == "multi_label" else ranked or 1
    fields = {
        "widths": (predicted, 1, labels.num_labels),
        "columns": lambda _, predictions, __, logits: columns_of(request, labels, predictions, logits),
    }
    notes = {"model": f"{request.model}: {labels}", "data": data}
    if not scored.any():
        return fields | {"notes": notes}
    kind = "image_classification" if ranked and labels.kind == "classification" else labels.kind
    config = request.config if hasattr(request.config, "metric_name") else MetricOptions()  # a recipe may have none
    metrics = resolve_metrics(config, kind, labels.names, targets[scored])

    def score(predictions: Outputs, losses: Outputs, logits: Outputs) -> dict[str, float]:
        shares = metrics.probabilities(torch.from_numpy(logits[scored])).numpy() if metrics.take_scores else None
        values = metrics.compute(predictions[scored].astype(np.float64), targets[scored], shares)
        loss = float(losses[scored].astype(np.float64).mean())
        return {"eval_loss": loss} | {f"eval_{name}": value for name, value in values.items()}

    return fields | {"score": score, "notes": notes | metrics.notes}


def columns_of(request: Request, labels: Labels, predictions: Outputs, logits: Outputs) -> dict[str, pa.Array]:
    """The columns of outputs [n, ...]: `prediction`, and the probability of each class or label.

    Raises:
        UserError: a label contains the separator of several labels in a CSV file.
    """
    if labels.kind == "regression":
        return {PREDICTION: pa.array(predictions[:, 0])}
    names, values = pa.array(labels.names), torch.from_numpy(np.ascontiguousarray(logits))
    if labels.kind == "classification":
        column, shares = names.take(pa.array(predictions[:, 0].astype(np.int64))), values.softmax(1)
    else:
        rows, places = np.nonzero(predictions)
        bounds = np.cumsum(np.bincount(rows + 1, minlength=len(predictions) + 1)).astype(np.int32)
        column, shares = pa.ListArray.from_arrays(pa.array(bounds), names.take(pa.array(places))), values.sigmoid()
        if request.output.suffix == ".csv":
            delimiter = labels.delimiter or DELIMITER
            if inside := [name for name in labels.names if delimiter in name]:
                raise UserError(
                    f"--predictions_file {request.output}: the label {inside[0]!r} contains {delimiter!r}, which "
                    "separates labels in a CSV file: use a name that ends in .jsonl or .parquet"
                )
            column = pc.binary_join(column, delimiter)
    probabilities = zip(labels.names, np.ascontiguousarray(shares.numpy().T), strict=True)
    return {PREDICTION: column} | {PROBABILITY + name: pa.array(each) for name, each in probabilities}


def with_targets(labels: Any, targets: NDArray[Any]) -> Any:
    """Labels or tags whose `encode` returns the known targets, for the functions of a recipe that call it."""
    known = copy(labels)
    vars(known)["encode"] = lambda _: targets
    return known


def labels_of_model(request: Request) -> Labels:
    """The labels of a model, by its config.

    A model without `problem_type` is one of regression if it has one output, as in the losses of transformers.

    Raises:
        UserError: two labels have one name, or --label_column_name names several columns, which are not the labels of
            the model.
    """
    given, names = request.config.label_column_name, stored_names(str(request.model))
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"{request.model / 'config.json'}: two labels have the name {twice[0]}: rename one in id2label")
    columns = (given,) if isinstance(given, str) else given
    problem = load_pretrained("AutoConfig", str(request.model)).problem_type
    kind = KINDS[problem or ("regression" if len(names) == 1 else "single_label_classification")]
    if kind == "regression":
        return Labels(kind, columns)
    if len(columns) == 1:
        return Labels(kind, columns, names, names, delimiter=getattr(request.config, "label_delimiter", None))
    if sorted(columns) != sorted(names):
        raise UserError(
            f"{FLAG} {' '.join(columns)}: the labels of the model are {', '.join(names)}: name these columns"
        )
    return Labels("multi_label", names, names, names)


def targets_of(request: Request, labels: Labels, table: pa.Table) -> tuple[NDArray[Any], Mask]:
    """The targets of all rows of the input, 0 where a row has no label, and the rows that have one and are scored.

    No row is scored if there is no label column, all labels are missing, or no scores are wanted. Labels are matched
    by name. If the model has no names for its labels, the numbers of the table are used.

    Raises:
        UserError: a label is unknown to the model or malformed, or a column that is asked for does not exist.
    """
    shape = (table.num_rows, labels.num_labels) if labels.kind == "multi_label" else (table.num_rows,)
    targets = np.zeros(shape, DTYPES[labels.kind])
    labeled = have_labels(request, table, labels.columns)
    if labels.delimiter is not None and labeled.any():
        labeled[:] = True  # an empty text means no label, unless all are empty
    if labeled.any():
        targets[labeled] = encoded(as_in_table(labels, table).encode, table, labeled)
    return targets, labeled


def have_labels(request: Request, table: pa.Table, columns: tuple[str, ...]) -> Mask:
    """bool [rows]: which rows have labels in `columns`; none if no scores are wanted, or no column exists.

    Raises:
        UserError: a column that is asked for, or one of several, does not exist.
    """
    is_asked = "label_column_name" in request.given
    if not request.config.scores or (not is_asked and {*columns}.isdisjoint(table.column_names)):
        return np.zeros(table.num_rows, bool)
    for name in columns:
        column_of(table, name, FLAG)
    return ~np.any([missing(decided(table, name, None), name, of_values=True) for name in columns], axis=0)


def encoded(encode: Callable[[pa.Table], NDArray[Any]], table: pa.Table, labeled: Mask) -> NDArray[Any]:
    """The targets of the rows with labels, and a message about the others; an error of `encode` names --no_scores."""
    if without := int((~labeled).sum()):
        say(f"{without:,} of {len(labeled):,} rows have no label: the scores are those of the other rows")
    try:
        return encode(table if labeled.all() else numbered(table).filter(pa.array(labeled)))
    except UserError as error:
        raise UserError(f"{error}; or use --no_scores, to predict without scores") from None


def as_in_table(labels: Labels, table: pa.Table) -> Labels:
    """The labels of a model as the label column of `table` may write them: as names, numbers, or lists of 0 and 1."""
    if not labels.names or len(labels.columns) > 1:
        return labels
    numbers = tuple(map(str, range(len(labels.names))))
    if are_placeholders(labels.names):
        return replace(labels, values=numbers, named=True)
    in_lists = labels.kind == "multi_label" and is_list(table.schema.field(labels.columns[0]).type)
    if in_lists and labels.delimiter is None and labels.names == numbers:
        widths = pc.list_value_length(table[labels.columns[0]]).drop_null()
        return replace(labels, vectors=bool(pc.all(pc.equal(widths, len(numbers))).as_py()))
    return labels
