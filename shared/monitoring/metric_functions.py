"""The values of the shipped metrics, each one call of scikit-learn or SciPy.

The modules under metrics/ call these functions. Where the `evaluate` library is not installed, metric_sources.py calls
them directly, so both ways give the same bits. Each function converts its arguments to the types that its module
declares.

In all of them n is the number of samples, and the references have one of two forms: [n] class ids or numbers, or
[n, labels] of 0 and 1 in a multi-label task.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """The share of samples whose prediction equals their reference; of a multi-label row, all labels have to."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(integers(references), integers(predictions)))


def top_5_accuracy(predictions: ArrayLike, references: ArrayLike) -> float:
    """The share of samples whose reference is among the first five of the class ids [n, k], the likeliest first."""
    return float((integers(predictions)[:, :5] == integers(references)[:, None]).any(1).mean())


def macro_f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """The mean F1 of the classes that occur in either argument, or of all labels; an F1 of 0 / 0 is 0."""
    from sklearn.metrics import f1_score

    predicted, true = integers(predictions), integers(references)
    if true.ndim == 1:
        return float(f1_score(true, predicted, average="macro", zero_division=0.0))
    # Label by label, because scikit-learn takes a matrix with one column for class ids 0 and 1.
    return float(np.mean([f1_score(t, p, zero_division=0.0) for t, p in zip(true.T, predicted.T, strict=True)]))


def micro_f1(predictions: ArrayLike, references: ArrayLike) -> float:
    """The F1 of all entries of [n, labels] together; 0 when no label is predicted or true anywhere.

    The entries are flattened, because scikit-learn takes a matrix with one column for class ids 0 and 1.
    """
    from sklearn.metrics import f1_score

    predicted, true = integers(predictions).ravel(), integers(references).ravel()
    return float(f1_score(true, predicted, zero_division=0.0))


def precision_of_class(predictions: ArrayLike, references: ArrayLike, pos_label: int = 1) -> float:
    """The precision of class or label `pos_label` against all others; 0 where it is 0 / 0."""
    from sklearn.metrics import precision_score

    predicted, true = one_class(predictions, pos_label), one_class(references, pos_label)
    return float(precision_score(true, predicted, zero_division=0.0))


def recall_of_class(predictions: ArrayLike, references: ArrayLike, pos_label: int = 1) -> float:
    """The recall of class or label `pos_label` against all others; 0 where it is 0 / 0."""
    from sklearn.metrics import recall_score

    predicted, true = one_class(predictions, pos_label), one_class(references, pos_label)
    return float(recall_score(true, predicted, zero_division=0.0))


def f1_of_class(predictions: ArrayLike, references: ArrayLike, pos_label: int = 1) -> float:
    """The F1 of class or label `pos_label` against all others; 0 where it is 0 / 0."""
    from sklearn.metrics import f1_score

    predicted, true = one_class(predictions, pos_label), one_class(references, pos_label)
    return float(f1_score(true, predicted, zero_division=0.0))


def matthews_correlation(predictions: ArrayLike, references: ArrayLike) -> float:
    """The Matthews correlation of class ids; 0 when predictions or references are all the same."""
    from sklearn.metrics import matthews_corrcoef

    predicted, true = integers(predictions), integers(references)
    if is_constant(predicted) or is_constant(true):  # scikit-learn returns 0 as well, but warns
        return 0.0
    return float(matthews_corrcoef(true, predicted))


def roc_auc(predictions: ArrayLike, references: ArrayLike) -> float:
    """The area under the ROC curve of probabilities [n, classes]: of two classes, that of the second.

    Of more classes or labels it is the mean over them, each class against all others. A class that no sample or every
    sample has is left out of the mean. NaN means that no class is left, or that a probability is not finite.
    """
    from sklearn.metrics import roc_auc_score

    scores, true = np.asarray(predictions, np.float32), np.asarray(references)
    if not np.isfinite(scores).all():
        return float("nan")
    if true.ndim == 1:
        true = true[:, None] == np.arange(scores.shape[1])
        if scores.shape[1] == 2:
            scores, true = scores[:, 1:], true[:, 1:]
    # Class by class, because scikit-learn refuses a class without samples.
    curves = [roc_auc_score(t, s) for t, s in zip(true.T, scores.T, strict=True) if not is_constant(t)]
    return float(np.mean(curves)) if curves else float("nan")


def pearson(predictions: ArrayLike, references: ArrayLike) -> float:
    """Pearson's correlation of numbers; 0 where one side is constant, NaN where a prediction is not finite."""
    from scipy.stats import pearsonr

    return correlation(pearsonr, predictions, references)


def spearman(predictions: ArrayLike, references: ArrayLike) -> float:
    """Spearman's correlation of numbers; 0 where one side is constant, NaN where a prediction is not finite."""
    from scipy.stats import spearmanr

    return correlation(spearmanr, predictions, references)


def mean_squared_error(predictions: ArrayLike, references: ArrayLike) -> float:
    """The mean squared error of numbers; NaN where a prediction is not finite, for which scikit-learn raises."""
    from sklearn.metrics import mean_squared_error as compute

    predicted = np.asarray(predictions, np.float64)
    if not np.isfinite(predicted).all():
        return float("nan")
    return float(compute(np.asarray(references, np.float64), predicted))


def correlation(compute: Callable[..., Any], predictions: ArrayLike, references: ArrayLike) -> float:
    """`compute`, a correlation of SciPy, of numbers: 0 where one side is constant, for which SciPy gives NaN and warns.

    0 is also what scikit-learn's Matthews correlation gives: a constant predicts nothing. NaN means that a prediction
    is not finite.
    """
    predicted, true = np.asarray(predictions, np.float64), np.asarray(references, np.float64)
    if not np.isfinite(predicted).all():
        return float("nan")
    return 0.0 if is_constant(predicted) or is_constant(true) else float(compute(true, predicted).statistic)


def integers(values: ArrayLike) -> NDArray[np.int64]:
    """Class ids, or rows of 0 and 1, as an array."""
    return np.asarray(values, np.int64)


def is_constant(values: NDArray[Any]) -> bool:
    """Whether all of `values` are the same."""
    return bool((values == values[0]).all())


def one_class(values: ArrayLike, pos_label: int) -> NDArray[np.bool_]:
    """[n] whether each sample is of the class `pos_label`, or has that label."""
    found = integers(values)
    return found == pos_label if found.ndim == 1 else found[:, pos_label] == 1
