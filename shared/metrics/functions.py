"""The shipped metrics of classification and regression, computed by scikit-learn and SciPy.

In all functions n is the number of samples, and the references have one of two forms: [n] class ids (int64) or numbers
(float64), or [n, labels] of 0 and 1 in a multi-label task. Predictions have the same form, except where a docstring
says otherwise.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Function = Callable[[Array, Array], float]  # of predictions and references


def of_sklearn(name: str, **arguments: Any) -> Function:
    """A function of sklearn.metrics, which is imported at the first call, because its import takes a second."""

    def compute(predictions: Array, references: Array) -> float:
        import sklearn.metrics

        return float(getattr(sklearn.metrics, name)(references, predictions, **arguments))

    return compute


binary_f1 = of_sklearn("f1_score", zero_division=0.0)


def top_5_accuracy(predictions: Array, references: Array) -> float:
    """The share of samples whose class is among the first five of the class ids [n, k], the likeliest first."""
    return float((predictions[:, :5] == references[:, None]).any(1).mean())


def macro_f1(predictions: Array, references: Array) -> float:
    """The mean F1 of the classes that occur in either argument, or of all labels; an F1 of 0 / 0 is 0."""
    if references.ndim == 1:
        return of_sklearn("f1_score", average="macro", zero_division=0.0)(predictions, references)
    # Label by label, because scikit-learn takes a matrix with one column for class ids 0 and 1.
    return float(np.mean([binary_f1(p, t) for p, t in zip(predictions.T, references.T, strict=True)]))


def micro_f1(predictions: Array, references: Array) -> float:
    """The F1 of all entries of [n, labels] together; 0 if no label is predicted or true anywhere."""
    return binary_f1(predictions.ravel(), references.ravel())


def matthews_correlation(predictions: Array, references: Array) -> float:
    """The Matthews correlation of class ids; 0 if predictions or references are all the same."""
    if is_constant(predictions) or is_constant(references):  # scikit-learn returns 0 as well, but warns
        return 0.0
    return of_sklearn("matthews_corrcoef")(predictions, references)


def roc_auc(scores: Array, references: Array) -> float:
    """The area under the ROC curve of probabilities [n, classes]: of two classes, that of the second.

    Of more classes or labels it is the mean over them, each class against all others. A class that no sample or every
    sample has is left out of the mean. NaN means that no class is left, or that a probability is not finite.
    """
    scores = np.asarray(scores, np.float32)
    if not np.isfinite(scores).all():
        return float("nan")
    if references.ndim == 1:
        references = references[:, None] == np.arange(scores.shape[1])
        if scores.shape[1] == 2:
            scores, references = scores[:, 1:], references[:, 1:]
    # Class by class, because scikit-learn refuses a class without samples.
    area, pairs = of_sklearn("roc_auc_score"), zip(scores.T, references.T, strict=True)
    areas = [area(score, true) for score, true in pairs if not is_constant(true)]
    return float(np.mean(areas)) if areas else float("nan")


def correlation(name: str) -> Function:
    """A correlation of numbers by scipy.stats; 0 if one side is constant, NaN if a prediction is not finite.

    SciPy gives NaN for a constant. A constant predicts nothing, so 0 is used, as for the Matthews correlation.
    """

    def compute(predictions: Array, references: Array) -> float:
        import scipy.stats

        if not np.isfinite(predictions).all():
            return float("nan")
        if is_constant(predictions) or is_constant(references):
            return 0.0
        return float(getattr(scipy.stats, name)(references, predictions).statistic)

    return compute


def mean_squared_error(predictions: Array, references: Array) -> float:
    """The mean squared error of numbers; NaN if a prediction is not finite, for which scikit-learn raises."""
    return of_sklearn("mean_squared_error")(predictions, references) if np.isfinite(predictions).all() else float("nan")


def is_constant(values: Array) -> bool:
    """Whether all of `values` are the same."""
    return bool((values == values[0]).all())


SHIPPED: dict[str, Function] = {
    "accuracy": of_sklearn("accuracy_score"),  # of a multi-label row, all labels have to be right
    "top_5_accuracy": top_5_accuracy,
    "macro_f1": macro_f1,
    "micro_f1": micro_f1,
    "matthews_correlation": matthews_correlation,
    "pearson": correlation("pearsonr"),
    "spearman": correlation("spearmanr"),
    "mean_squared_error": mean_squared_error,
    "precision_of_class": of_sklearn("precision_score", zero_division=0.0),
    "recall_of_class": of_sklearn("recall_score", zero_division=0.0),
    "f1_of_class": binary_f1,
    "roc_auc": roc_auc,
}
OF_CLASS = ("precision_of_class", "recall_of_class", "f1_of_class")  # of [n]: is each sample of --positive_label?
RANKED = ("top_5_accuracy",)  # of the likeliest classes of each sample, not only the first
SCORED = ("roc_auc",)  # of the probabilities of all classes
# The metrics of each kind of task; the first decides which checkpoint is best.
DEFAULTS = {
    "classification": ("accuracy", "macro_f1", "matthews_correlation"),
    "image_classification": ("accuracy", "top_5_accuracy", "macro_f1"),
    "multi_label": ("micro_f1", "macro_f1", "accuracy"),
    "regression": ("pearson", "spearman", "mean_squared_error"),
}


def shipped_names(kind: str, num_classes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The metrics that a kind of task computes without --metric_name, the main one first, and the others that fit."""
    # The true class is always among the five likeliest of at most five.
    defaults = tuple(name for name in DEFAULTS[kind] if num_classes > 5 or name not in RANKED)
    return defaults, () if kind == "regression" else (*OF_CLASS, *SCORED)
