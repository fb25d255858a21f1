"""The shipped metrics equal their definitions, also where scikit-learn or SciPy would warn or refuse."""

import warnings
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, precision_score, recall_score

from shared.metrics.functions import SHIPPED


def pairs_in_order(scores: np.ndarray, references: np.ndarray) -> float:
    """Mean over classes of the share of pairs (a sample of the class, one of another) whose scores have this order."""
    shares = []
    for i, score in [*enumerate(scores.T)][scores.shape[1] == 2 :]:
        inside, outside = score[references == i][:, None], score[references != i]
        if inside.size and outside.size:
            shares.append(np.mean((inside > outside) + 0.5 * (inside == outside)))
    return float(np.mean(shares)) if shares else np.nan


SCORES = st.tuples(st.integers(1, 20), st.integers(2, 4)).flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.float32, shape, elements=st.integers(0, 8).map(lambda i: i / 8)),
        hnp.arrays(np.int64, shape[0], elements=st.integers(0, shape[1] - 1)),
    )
)


@settings(max_examples=25)
@given(SCORES)
def test_the_area_under_the_curve_equals_its_definition(pair: tuple[np.ndarray, np.ndarray]) -> None:
    value = SHIPPED["roc_auc"](*pair)
    assert value == pytest.approx(pairs_in_order(*pair), abs=1e-12, nan_ok=True)
    assert type(value) is float


ROWS = st.tuples(st.integers(1, 20), st.integers(1, 4)).flatmap(
    lambda shape: hnp.arrays(np.int64, (2, *shape), elements=st.integers(0, 1))
)


@given(ROWS)
def test_counts_of_classes_and_labels_equal_scikit_learn(pair: np.ndarray) -> None:
    """Rows of labels, and class ids that are the number of their labels."""
    ids = pair.sum(2)
    for predictions, references in (pair, ids):
        f1 = partial(f1_score, references, predictions, zero_division=0.0)
        assert SHIPPED["accuracy"](predictions, references) == accuracy_score(references, predictions)
        if predictions.shape[1:] != (1,):  # one column is class ids for scikit-learn
            assert SHIPPED["macro_f1"](predictions, references) == pytest.approx(f1(average="macro"), abs=1e-12)
    assert SHIPPED["micro_f1"](*pair) == f1_score(*pair[::-1].reshape(2, -1), zero_division=0.0)
    for name, metric in {"precision": precision_score, "recall": recall_score, "f1": f1_score}.items():
        expected = metric(*pair[::-1, :, 0], zero_division=0.0)
        assert SHIPPED[f"{name}_of_class"](*pair[..., 0].astype(bool)) == pytest.approx(expected, abs=1e-12)
    if np.ptp(ids):
        expected = matthews_corrcoef(*ids[::-1])
        assert SHIPPED["matthews_correlation"](*ids) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["matthews_correlation", "pearson", "spearman"])
@pytest.mark.parametrize(("predictions", "references"), [([1, 1, 1], [0, 1, 2]), ([0, 1, 2], [1, 1, 1]), ([1], [1])])
def test_a_correlation_with_a_constant_is_zero_without_a_warning(
    name: str, predictions: list[int], references: list[int]
) -> None:
    with warnings.catch_warnings(action="error"):
        assert SHIPPED[name](np.array(predictions), np.array(references)) == 0.0


@pytest.mark.parametrize("name", ["pearson", "spearman", "mean_squared_error", "roc_auc"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_prediction_that_is_not_finite_gives_nan(name: str, bad: float) -> None:
    predictions, references = np.array([0.0, bad, 1.0]), np.array([0.0, 1.0, 2.0])
    assert np.isnan(SHIPPED[name](predictions, references))


ONE_LABEL = np.array([[1], [0], [0], [1]]), np.array([[1], [0], [1], [0]])  # not two classes
NEVER = (np.array([[1, 0], [0, 0], [1, 0]]),) * 2  # the second label never occurs


@pytest.mark.parametrize(
    ("name", "rows", "value"),
    [("macro_f1", ONE_LABEL, 0.5), ("micro_f1", ONE_LABEL, 0.5), ("macro_f1", NEVER, 0.5), ("micro_f1", NEVER, 1.0)],
)
def test_one_label_and_a_label_that_never_occurs_are_scored_without_a_warning(
    name: str, rows: tuple[np.ndarray, np.ndarray], value: float
) -> None:
    with warnings.catch_warnings(action="error"):
        assert SHIPPED[name](*rows) == value
