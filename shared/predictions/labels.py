"""Predictions of classifiers and of regression: their outputs, columns and scores, and the labels of the input."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.datasets.labels import FLAG, KINDS, Labels
from shared.datasets.rows import column_of, missing, numbered
from shared.errors import UserError, say
from shared.metrics.task_metrics import resolve_metrics
from shared.predictions.prediction import Outputs
from shared.predictions.request import Request
from shared.pretrained.from_pretrained import are_placeholders, load_pretrained, stored_names

PREDICTION, PROBABILITY = "prediction", "probability_"
DELIMITER = ","  # between several labels of a row in a CSV file
DTYPES = {"classification": np.int64, "multi_label": np.float32, "regression": np.float64}  # of `Labels.encode`
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class LabelOutputs:
    """The outputs of a sample: its prediction, its logits if there are several classes or labels, and its loss.

    Args:
        request: what is predicted.
        labels: of the model.
        ranked: how many classes a prediction of a classifier ranks, the most likely first.
    """

    request: Request
    labels: Labels
    ranked: int = 1

    @property
    def predicted(self) -> int:
        """The number of outputs of a prediction."""
        return len(self.labels.names) if self.labels.kind == "multi_label" else self.ranked

    @property
    def width(self) -> int:
        """The number of outputs of a sample."""
        return self.predicted + len(self.labels.names) + 1

    def of_batch(self, predictions: Tensor, losses: Tensor, logits: Tensor) -> Tensor:
        """The outputs, float32 [rows, width], from what `predict_batch` of a recipe returns."""
        parts = [predictions.reshape(len(losses), -1), logits[:, : len(self.labels.names)], losses[:, None]]
        return torch.cat([part.float() for part in parts], dim=1)

    def logits(self, outputs: Outputs) -> Tensor:
        """The logits [n, labels] in outputs [n, width]."""
        return torch.from_numpy(np.ascontiguousarray(outputs[:, self.predicted : -1]))

    def columns(self, _: pa.Table, outputs: Outputs) -> dict[str, pa.Array]:
        """The columns of outputs [n, width]: `prediction`, and the probability of each class or label."""
        if self.labels.kind == "regression":
            return {PREDICTION: pa.array(outputs[:, 0])}
        names, logits = pa.array(self.labels.names), self.logits(outputs)
        if self.labels.kind == "classification":
            predictions, shares = names.take(pa.array(outputs[:, 0].astype(np.int64))), logits.softmax(1)
        else:
            shares = logits.sigmoid()
            rows, labels = np.nonzero(outputs[:, : self.predicted])
            bounds = np.cumsum(np.bincount(rows + 1, minlength=len(outputs) + 1)).astype(np.int32)
            predictions = pa.ListArray.from_arrays(pa.array(bounds), names.take(pa.array(labels)))
            if self.request.output.suffix == ".csv":
                predictions = pc.binary_join(predictions, self.delimiter())
        probabilities = np.ascontiguousarray(shares.numpy().T)
        named = zip(self.labels.names, probabilities, strict=True)
        return {PREDICTION: predictions} | {PROBABILITY + name: pa.array(each) for name, each in named}

    def delimiter(self) -> str:
        """The delimiter of several labels in a CSV file; UserError if a label contains it."""
        delimiter = getattr(self.request.config, "label_delimiter", None) or DELIMITER
        if inside := [name for name in self.labels.names if delimiter in name]:
            raise UserError(
                f"--predictions_file {self.request.output}: the label {inside[0]!r} contains {delimiter!r}, which "
                "separates labels in a CSV file: use a name that ends in .jsonl or .parquet"
            )
        return delimiter

    def scorer(
        self, targets: NDArray[Any], scored: Mask
    ) -> tuple[Callable[[Outputs], dict[str, float]] | None, dict[str, str]]:
        """A function that computes the scores of all outputs [rows, width], and notes for the user.

        The names are those of metrics.jsonl: eval_loss, eval_accuracy, ... The function is None without labels.

        Args:
            targets: of all rows; those of rows that are not scored have no meaning.
            scored: [rows] whether a row has a label.

        Raises:
            UserError: see `resolve_metrics`.
        """
        config, kind = self.request.config, self.labels.kind
        if not scored.any():
            return None, {"scores": "none, because there are no labels" if config.scores else "none, as requested"}
        if without := int((~scored).sum()):
            say(f"{without:,} of {len(scored):,} rows have no label: the scores are those of the other rows")
        kind_of_metrics = "image_classification" if self.request.kind == "images" and kind == "classification" else kind
        metrics = resolve_metrics(config, kind_of_metrics, self.labels.names, targets[scored])

        def score(outputs: Outputs) -> dict[str, float]:
            mine = outputs[scored]
            predictions = mine[:, : self.predicted] if kind == "multi_label" or self.ranked > 1 else mine[:, 0]
            shares = metrics.probabilities(self.logits(mine)).numpy() if metrics.take_scores else None
            values = metrics.compute(predictions.astype(np.float64), targets[scored], shares)
            loss = float(mine[:, -1].astype(np.float64).mean())
            return {"eval_loss": loss} | {f"eval_{name}": value for name, value in values.items()}

        return score, metrics.notes


def labels_of_model(request: Request) -> Labels:
    """The labels of a model, by its config.

    A model without `problem_type` is one of regression if it has one output, as in the losses of transformers.
    """
    given, names = request.config.label_column_name, stored_names(str(request.model))
    columns = (given,) if isinstance(given, str) else given
    problem = load_pretrained("AutoConfig", str(request.model)).problem_type
    kind = KINDS[problem or ("regression" if len(names) == 1 else "single_label_classification")]
    if kind == "regression":
        return Labels(kind, columns[0])
    if len(columns) > 1:
        return Labels("multi_label", names, names, names)
    return Labels(kind, columns[0], names, names, delimiter=getattr(request.config, "label_delimiter", None))


def targets_of(request: Request, labels: Labels, table: pa.Table) -> tuple[NDArray[Any], Mask]:
    """The targets of all rows of the input, 0 where a row has no label, and the rows that have one and are scored.

    No row is scored if there is no label column, all labels are missing, or no scores are wanted. Labels are matched
    by name. If the model has no names for its labels, the numbers of the table are used.

    Raises:
        UserError: a label is unknown to the model or malformed, or a column that is asked for does not exist.
    """
    shape = (table.num_rows, labels.num_labels) if labels.kind == "multi_label" else (table.num_rows,)
    targets, none = np.zeros(shape, DTYPES[labels.kind]), np.zeros(table.num_rows, bool)
    given = request.config.label_column_name
    columns = (given,) if isinstance(given, str) else given
    if not has_labels(request, table, columns):
        return targets, none
    for name in columns:
        column_of(table, name, FLAG)
    if len(columns) > 1 and sorted(columns) != sorted(labels.names):
        raise UserError(
            f"{FLAG} {' '.join(columns)}: the labels of the model are {', '.join(labels.names)}: name these columns"
        )
    gaps = np.any([missing(table, name) for name in columns], axis=0)
    # With a delimiter, an empty text means no label, unless all are empty.
    labeled = ~gaps if labels.delimiter is None or gaps.all() else ~none
    if not labeled.any():
        return targets, none
    with_labels = numbered(table).filter(pa.array(labeled))
    targets[labeled] = encoded(as_in_table(labels, table).encode, with_labels)
    return targets, labeled


def has_labels(request: Request, table: pa.Table, columns: tuple[str, ...]) -> bool:
    """Whether the labels in `columns` of a table are wanted, which they are if one of them exists or is asked for."""
    is_asked = "label_column_name" in request.given
    return request.config.scores and (is_asked or not {*columns}.isdisjoint(table.column_names))


def encoded(encode: Callable[[pa.Table], NDArray[Any]], labeled: pa.Table) -> NDArray[Any]:
    """The targets of the rows with labels; an error of `encode` also names --no_scores."""
    try:
        return encode(labeled)
    except UserError as error:
        raise UserError(f"{error}; or use --no_scores, to predict without scores") from None


def as_in_table(labels: Labels, table: pa.Table) -> Labels:
    """The labels of a model as the label column of `table` may write them: as names, numbers, or lists of 0 and 1."""
    if not labels.names or not isinstance(labels.column, str):
        return labels
    numbers = tuple(map(str, range(len(labels.names))))
    if are_placeholders(labels.names):
        return replace(labels, values=numbers, named=True)
    is_list = labels.kind == "multi_label" and pa.types.is_list(table.schema.field(labels.column).type)
    if is_list and labels.delimiter is None and labels.names == numbers:
        widths = pc.list_value_length(table[labels.column]).drop_null()
        return replace(labels, vectors=bool(pc.all(pc.equal(widths, len(numbers))).as_py()))
    return labels
