"""The metrics of the recipes equal their definitions, load offline, and count each sample once."""

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

FOLDER = Path(__file__).parents[2] / "shared" / "monitoring" / "metrics"


def sklearn(name: str, **arguments: Any) -> Callable[[np.ndarray, np.ndarray], float]:
    """A metric of scikit-learn with predictions as the first argument."""

    def compute(predictions: np.ndarray, references: np.ndarray) -> float:
        import sklearn.metrics

        with warnings.catch_warnings(action="ignore"):
            return getattr(sklearn.metrics, name)(references, predictions, **arguments)

    return compute


def second_label(name: str) -> Callable[[np.ndarray, np.ndarray], float]:
    """A metric of scikit-learn, computed on the second column."""
    return lambda p, r: sklearn(name, zero_division=0.0)(p[:, 1], r[:, 1])


def pairs_in_order(scores: np.ndarray, references: np.ndarray) -> float:
    """Mean over classes of the share of pairs (a sample of the class, one of another) whose scores have this order."""
    shares = []
    for i, score in [*enumerate(scores.T)][scores.shape[1] == 2 :]:
        inside, outside = score[references == i][:, None], score[references != i]
        if inside.size and outside.size:
            shares.append(np.mean((inside > outside) + 0.5 * (inside == outside)))
    return float(np.mean(shares)) if shares else np.nan


def correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    constant = np.ptp(predictions) == 0 or np.ptp(references) == 0
    return 0.0 if constant else np.corrcoef(predictions, references)[0, 1]


def rank_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    from scipy.stats import rankdata

    return correlation(rankdata(predictions), rankdata(references))


def pairs(values: st.SearchStrategy, shape: st.SearchStrategy, dtype: type) -> st.SearchStrategy:
    return shape.flatmap(lambda s: st.tuples(*[hnp.arrays(dtype, s, elements=values)] * 2))


CLASSES = pairs(st.integers(0, 4), st.integers(1, 40), np.int64)
LABELS = pairs(st.integers(0, 1), st.tuples(st.integers(1, 40), st.integers(2, 4)), np.int64)
RANKED = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[hnp.arrays(np.int64, shape, elements=st.integers(0, 9)) for shape in ((n, 7), (n,))])
)
SCORES = st.tuples(st.integers(1, 20), st.integers(2, 4)).flatmap(
    lambda shape: st.tuples(
        hnp.arrays(np.float32, shape, elements=st.integers(0, 8).map(lambda i: i / 8)),
        hnp.arrays(np.int64, shape[0], elements=st.integers(0, shape[1] - 1)),
    )
)
NUMBERS = pairs(st.integers(-200, 200).map(lambda i: i / 8), st.integers(1, 40), np.float64)

# (folder, config_name): a second implementation of the metric, and data for which it is defined.
EXPECTED: dict[tuple[str, str | None], tuple[Callable[[np.ndarray, np.ndarray], float], st.SearchStrategy]] = {
    ("accuracy", None): (lambda p, r: np.mean(p == r), CLASSES),
    ("accuracy", "multilabel"): (sklearn("accuracy_score"), LABELS),
    ("macro_f1", None): (sklearn("f1_score", average="macro", zero_division=0.0), CLASSES),
    ("macro_f1", "multilabel"): (sklearn("f1_score", average="macro", zero_division=0.0), LABELS),
    ("micro_f1", "multilabel"): (sklearn("f1_score", average="micro", zero_division=0.0), LABELS),
    ("matthews_correlation", None): (sklearn("matthews_corrcoef"), CLASSES),
    ("pearson", None): (correlation, NUMBERS),
    ("spearman", None): (rank_correlation, NUMBERS),
    ("mean_squared_error", None): (lambda p, r: np.mean((p - r) ** 2), NUMBERS),
    ("precision_of_class", None): (sklearn("precision_score", average="macro", labels=[1], zero_division=0.0), CLASSES),
    ("recall_of_class", None): (sklearn("recall_score", average="macro", labels=[1], zero_division=0.0), CLASSES),
    ("f1_of_class", None): (sklearn("f1_score", average="macro", labels=[1], zero_division=0.0), CLASSES),
    ("precision_of_class", "multilabel"): (second_label("precision_score"), LABELS),
    ("recall_of_class", "multilabel"): (second_label("recall_score"), LABELS),
    ("f1_of_class", "multilabel"): (second_label("f1_score"), LABELS),
    ("roc_auc", None): (pairs_in_order, SCORES),
    ("top_5_accuracy", None): (lambda p, r: np.mean([t in row[:5] for row, t in zip(p, r, strict=True)]), RANKED),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, str | None], Any]]:
    """evaluate.load for the folder of a metric, without a network and without writing to the user's home."""
    import evaluate

    modules: dict[tuple[str, str | None], Any] = {}
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socket.connect", lambda *_: pytest.fail("a connection was attempted"))
        if "evaluate_modules" not in sys.modules:  # Python looks for a package in one place only
            evaluate.config.HF_MODULES_CACHE = cache

        def cached(name: str, config_name: str | None = None) -> Any:
            if (name, config_name) not in modules:
                modules[name, config_name] = evaluate.load(str(FOLDER / name), config_name, cache_dir=str(cache))
            return modules[name, config_name]

        yield cached


def test_every_folder_of_a_metric_is_in_the_table() -> None:
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {name for name, _ in EXPECTED}


@pytest.mark.parametrize(("name", "config_name"), EXPECTED)
def test_a_metric_loads_offline_by_its_path_and_equals_its_definition(
    load: Any, name: str, config_name: str | None
) -> None:
    metric = load(name, config_name)
    expected, data = EXPECTED[name, config_name]

    @settings(max_examples=25, deadline=None)
    @given(data)
    def equal(pair: tuple[np.ndarray, np.ndarray]) -> None:
        predictions, references = pair
        values = metric.compute(predictions=predictions, references=references)
        assert values == {name: pytest.approx(expected(predictions, references), abs=1e-12, nan_ok=True)}
        assert type(values[name]) is float

    equal()


@settings(max_examples=20, deadline=None)
@given(CLASSES, st.lists(st.integers(1, 40), max_size=3))
def test_no_sample_is_lost_for_any_batching(load: Any, pair: tuple, cuts: list[int]) -> None:
    predictions, references = pair
    metric = load("accuracy")
    for predicted, true in zip(np.split(predictions, sorted(cuts)), np.split(references, sorted(cuts)), strict=True):
        if len(predicted):
            metric.add_batch(predictions=predicted, references=true)
    assert metric.compute() == {"accuracy": pytest.approx(np.mean(predictions == references))}


@pytest.mark.parametrize("name", ["matthews_correlation", "pearson", "spearman"])
@pytest.mark.parametrize(("predictions", "references"), [([1, 1, 1], [0, 1, 2]), ([0, 1, 2], [1, 1, 1]), ([1], [1])])
def test_a_correlation_with_a_constant_is_zero_without_a_warning(
    load: Any, name: str, predictions: list[int], references: list[int]
) -> None:
    metric = load(name)
    with warnings.catch_warnings(action="error"):
        assert metric.compute(predictions=predictions, references=references) == {name: 0.0}


@pytest.mark.parametrize("name", ["pearson", "spearman", "mean_squared_error"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_prediction_that_is_not_finite_gives_nan(load: Any, name: str, bad: float) -> None:
    value = load(name).compute(predictions=[0.0, bad, 1.0], references=[0.0, 1.0, 2.0])[name]
    assert np.isnan(value)


def test_numbers_are_compared_in_double_precision(load: Any) -> None:
    value = load("mean_squared_error").compute(predictions=[1 + 1e-9], references=[1.0])
    assert value == {"mean_squared_error": pytest.approx(1e-18, rel=1e-6, abs=0)}


@pytest.mark.parametrize("name", ["macro_f1", "micro_f1"])
def test_a_single_label_is_scored_as_one_label_and_not_as_two_classes(load: Any, name: str) -> None:
    true, predicted = np.array([[1], [0], [0], [1]]), np.array([[1], [0], [1], [0]])
    assert load(name, "multilabel").compute(predictions=predicted, references=true) == {name: 0.5}


@pytest.mark.parametrize(("name", "value"), [("macro_f1", 0.5), ("micro_f1", 1.0)])
def test_a_label_that_never_occurs_scores_zero_without_a_warning(load: Any, name: str, value: float) -> None:
    rows = np.array([[1, 0], [0, 0], [1, 0]])
    with warnings.catch_warnings(action="error"):
        assert load(name, "multilabel").compute(predictions=rows, references=rows) == {name: value}
