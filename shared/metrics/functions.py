"""The shipped metrics of classification and regression.

Most are counts of classes. The correlations come from SciPy and the ROC curve from scikit-learn, which are imported
only for them: in a run of a minute, their import is 2 % of the time.

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


def of_finite(function: Function) -> Function:
    """A function that is NaN if a prediction is not finite: libraries raise an error or warn."""

    def compute(predictions: Array, references: Array) -> float:
        return function(predictions, references) if np.isfinite(predictions).all() else float("nan")

    return compute


def correlation(name: str) -> Function:
    """A correlation of scipy.stats. A constant predicts nothing, so its correlation is 0; for SciPy, it is NaN."""

    def compute(predictions: Array, references: Array) -> float:
        from scipy import stats

        if is_constant(predictions) or is_constant(references):
            return 0.0
        return float(getattr(stats, name)(references, predictions).statistic)

    return of_finite(compute)


def is_constant(values: Array) -> bool:
    """Whether all of `values` are the same."""
    return bool((values == values[0]).all())


def accuracy(predictions: Array, references: Array) -> float:
    """The share of samples that are right; of a multi-label row, all labels have to be right."""
    right = predictions == references
    return float((right.all(1) if right.ndim == 2 else right).mean())


def counts(predictions: Array, references: Array) -> tuple[Array, Array, Array]:
    """How often each class or label is predicted, is true, and is both; each int64 [labels]."""
    if references.ndim == 2:
        return predictions.sum(0), references.sum(0), (predictions & references).sum(0)
    size = int(max(predictions.max(), references.max())) + 1
    sides = predictions, references, references[predictions == references]
    predicted, true, both = (np.bincount(ids, minlength=size) for ids in sides)
    return predicted, true, both


def macro_f1(predictions: Array, references: Array) -> float:
    """The mean F1 of the classes that occur in either argument, or of all labels; an F1 of 0 / 0 is 0."""
    predicted, true, both = counts(predictions, references)
    f1 = 2 * both / np.maximum(predicted + true, 1)
    return float(f1.mean() if references.ndim == 2 else f1[predicted + true > 0].mean())


def micro_f1(predictions: Array, references: Array) -> float:
    """The F1 of all entries of a multi-label task together; 0 if no label is predicted or true."""
    predicted, true, both = map(np.sum, counts(predictions, references))
    return float(2 * both / max(predicted + true, 1))


def matthews_correlation(predictions: Array, references: Array) -> float:
    """The correlation of classes, R_K of Gorodkin (doi:10.1016/j.compbiolchem.2004.09.006); 0 if one is constant."""
    predicted, true, both = (each.astype(float) for each in counts(predictions, references))
    size = len(references)
    variances = (size**2 - predicted @ predicted) * (size**2 - true @ true)
    return float((size * both.sum() - predicted @ true) / np.sqrt(variances)) if variances else 0.0


def roc_auc(scores: Array, references: Array) -> float:
    """The area under the ROC curve of probabilities [n, classes]: of two classes, that of the second.

    Of more classes or labels it is the mean over them, each class against all others. A class that no sample or every
    sample has is left out of the mean. NaN means that no class is left.
    """
    from sklearn.metrics import roc_auc_score

    if references.ndim == 1:
        references = references[:, None] == np.arange(scores.shape[1])
        if scores.shape[1] == 2:
            scores, references = scores[:, 1:], references[:, 1:]
    # Class by class, because scikit-learn refuses a class without samples.
    pairs = zip(scores.T, references.T, strict=True)
    areas = [roc_auc_score(true, score) for score, true in pairs if not is_constant(true)]
    return float(np.mean(areas)) if areas else float("nan")


SHIPPED: dict[str, Function] = {
    "accuracy": accuracy,
    "top_5_accuracy": lambda ranked, true: float((ranked[:, :5] == true[:, None]).any(1).mean()),
    "macro_f1": macro_f1,
    "micro_f1": micro_f1,
    "matthews_correlation": matthews_correlation,
    "pearson": correlation("pearsonr"),
    "spearman": correlation("spearmanr"),
    "mean_squared_error": of_finite(lambda predicted, true: float(np.square(predicted - true).mean())),
    "precision_of_class": lambda predicted, true: float((predicted & true).sum() / max(predicted.sum(), 1)),
    "recall_of_class": lambda predicted, true: float((predicted & true).sum() / max(true.sum(), 1)),
    "f1_of_class": lambda predicted, true: float(2 * (predicted & true).sum() / max(predicted.sum() + true.sum(), 1)),
    "roc_auc": of_finite(roc_auc),
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
