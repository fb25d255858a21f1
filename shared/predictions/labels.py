"""Predictions of classifiers and of regression: their columns, and their scores where the input has labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch.nn import functional as F

from shared.datasets.labels import FLAG, KINDS, Kind, Labels
from shared.datasets.rows import column_of, missing, numbered
from shared.errors import UserError, listed, say
from shared.metrics.task_metrics import resolve_metrics
from shared.predictions.output import FORMATS
from shared.predictions.prediction import Outputs
from shared.predictions.settings import ClassifierSettings
from shared.pretrained.from_pretrained import are_placeholders

PREDICTION, PROBABILITY = "prediction", "probability_"
DELIMITER = ","  # between several labels of a row in a CSV file
MOST_RANKED = 5  # classes per image, for top-5 accuracy


@dataclass(frozen=True)
class Task:
    """What a classifier or a regression model predicts."""

    kind: Kind
    names: tuple[str, ...]  # of the classes or labels, in the order of the outputs; empty for regression
    delimiter: str | None = None  # joins the labels of a row; None: they are a list

    def __str__(self) -> str:
        return f"{self.kind}, {len(self.names)} labels: {listed(self.names)}" if self.names else self.kind

    @property
    def width(self) -> int:
        """The number of outputs of a sample."""
        return len(self.names) or 1

    @classmethod
    def of_model(cls, config: Any, names: tuple[str, ...], settings: ClassifierSettings) -> "Task":
        """The task of a model with this `PretrainedConfig`, whose labels are `names`.

        A model without `problem_type` is one of regression if it has one output, as in the losses of transformers.

        Raises:
            UserError: the delimiter of a CSV file is part of a label.
        """
        kind = KINDS[config.problem_type or ("regression" if len(names) == 1 else "single_label_classification")]
        delimiter = None
        if kind == "multi_label" and settings.predictions_file.endswith(FORMATS[0]):
            delimiter = getattr(settings, "label_delimiter", None) or DELIMITER
            if inside := [name for name in names if delimiter in name]:
                raise UserError(
                    f"--predictions_file {settings.predictions_file}: the label {inside[0]!r} contains {delimiter!r}, "
                    f"which separates labels in a CSV file: use a name that ends in {FORMATS[1]} or {FORMATS[2]}"
                )
        return cls(kind, () if kind == "regression" else names, delimiter)

    def columns(self, outputs: Outputs) -> dict[str, pa.Array]:
        """The columns of the outputs [n, width]: `prediction`, and the probability of each class or label."""
        if self.kind == "regression":
            return {PREDICTION: pa.array(outputs[:, 0])}
        logits, names = torch.from_numpy(np.ascontiguousarray(outputs)), pa.array(self.names)
        if self.kind == "classification":
            predictions, shares = names.take(pa.array(logits.argmax(1).numpy())), logits.softmax(1)
        else:
            shares = logits.sigmoid()
            rows, labels = np.nonzero(outputs > 0)
            ends = np.cumsum(np.bincount(rows, minlength=len(outputs)))
            predictions = pa.ListArray.from_arrays(
                pa.array(np.r_[0, ends].astype(np.int32)), names.take(pa.array(labels))
            )
            if self.delimiter is not None:
                predictions = pc.binary_join(predictions, self.delimiter)
        probabilities = np.ascontiguousarray(shares.numpy().T)
        return {PREDICTION: predictions} | {
            PROBABILITY + name: pa.array(each) for name, each in zip(self.names, probabilities, strict=True)
        }

    def losses(self, outputs: Outputs, targets: np.ndarray) -> torch.Tensor:
        """The loss of each sample, float64 [n], as in the evaluation of the recipes."""
        logits, true = torch.from_numpy(np.ascontiguousarray(outputs)), torch.tensor(targets)
        if self.kind == "classification":
            return F.cross_entropy(logits, true, reduction="none").double()
        if self.kind == "multi_label":
            return F.binary_cross_entropy_with_logits(logits, true, reduction="none").mean(1).double()
        return (logits[:, 0].double() - true).square()


def labels_of(task: Task, columns: Sequence[str], delimiter: str | None, table: pa.Table) -> Labels:
    """The meaning of the label columns of `table` for a model with this task.

    Labels are matched by name. If the model has no names for its labels, the numbers of the table are used.

    Raises:
        UserError: several columns do not have the names of the model's labels.
    """
    names = task.names
    if task.kind == "regression":
        return Labels(task.kind, columns[0])
    if len(columns) > 1:
        if sorted(columns) != sorted(names):
            raise UserError(
                f"{FLAG} {' '.join(columns)}: the labels of the model are {', '.join(names)}: name these columns"
            )
        return Labels("multi_label", names, names, names)
    type_ = column_of(table, columns[0], FLAG).type
    numbers = tuple(map(str, range(len(names))))
    vectors = False
    if task.kind == "multi_label" and delimiter is None and pa.types.is_list(type_) and names == numbers:
        widths = pc.list_value_length(table[columns[0]]).drop_null()
        vectors = bool(pc.all(pc.equal(widths, len(names))).as_py())
    is_numbered = are_placeholders(names)
    return Labels(
        task.kind,
        columns[0],
        names,
        numbers if is_numbered else names,
        named=is_numbered,
        vectors=vectors,
        delimiter=delimiter,
    )


def labeled_rows(table: pa.Table, columns: Sequence[str], delimiter: str | None) -> np.ndarray:
    """bool [N]: the rows that have labels. With a delimiter, an empty text means no label, unless all are empty."""
    gaps = np.any([missing(table, name) for name in columns], axis=0)
    return ~gaps if delimiter is None or gaps.all() else np.ones(table.num_rows, bool)


def targets_of(task: Task, table: pa.Table, settings: ClassifierSettings) -> tuple[np.ndarray, np.ndarray] | None:
    """Which rows of the input have labels, as their numbers, and the targets of these rows.

    None if there is no label column, all labels are missing, or no scores are wanted. The targets are those of
    `Labels.encode`.

    Raises:
        UserError: a label is unknown to the model or malformed, or a column that is asked for does not exist.
    """
    given, delimiter = settings.label_column_name, getattr(settings, "label_delimiter", None)
    columns = (given,) if isinstance(given, str) else given
    if not settings.scores or not (settings.labels_required or {*columns} & {*table.column_names}):
        return None
    for name in columns:
        column_of(table, name, FLAG)
    labeled = labeled_rows(table, columns, delimiter)
    if not labeled.any():
        return None
    labels = labels_of(task, columns, delimiter, table)
    try:
        return np.flatnonzero(labeled), labels.encode(numbered(table).filter(pa.array(labeled)))
    except UserError as error:
        raise UserError(f"{error}; or use --no_scores, to predict without scores") from None


def scorer(
    task: Task,
    settings: ClassifierSettings,
    found: tuple[np.ndarray, np.ndarray] | None,
    rows: int,
    images: bool = False,
) -> tuple[Callable[[Outputs], dict[str, float]] | None, dict[str, str]]:
    """A function that computes the scores of all outputs [rows, width], and notes for the user.

    The names are those of metrics.jsonl: eval_loss, eval_accuracy, ... The function is None if there are no labels.

    Args:
        task: of the model.
        settings: name the metrics.
        found: the numbers of the rows with labels, and their targets; None: there are none.
        rows: the number of samples.
        images: whether the metrics are those of the image recipe.

    Raises:
        UserError: see `resolve_metrics`.
    """
    if found is None:
        return None, {"scores": "none, because there are no labels" if settings.scores else "none, as requested"}
    labeled, targets = found
    if len(labeled) < rows:
        say(f"{rows - len(labeled):,} of {rows:,} rows have no label: the scores are those of the other rows")
    ranked = images and task.kind == "classification"
    kind = "image_classification" if ranked else task.kind
    metrics = resolve_metrics(settings, kind, task.names, targets)

    def score(outputs: Outputs) -> dict[str, float]:
        mine = outputs[labeled]
        logits = torch.from_numpy(mine)
        if task.kind == "regression":
            predictions = mine[:, 0]
        elif task.kind == "multi_label":
            predictions = mine > 0
        elif ranked:
            predictions = logits.topk(min(MOST_RANKED, task.width)).indices.numpy()
        else:
            predictions = logits.argmax(1).numpy()
        shares = metrics.probabilities(logits).numpy() if metrics.take_scores else None
        values = metrics.compute(predictions.astype(np.float64), targets, shares)
        loss = float(task.losses(mine, targets).mean())
        return {"eval_loss": loss} | {f"eval_{name}": value for name, value in values.items()}

    return score, metrics.notes
