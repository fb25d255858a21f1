"""The metrics of a task: which ones, of which numbers, and what is refused or noted before training."""

from typing import Any

import numpy as np
import pytest
import runs
from resolved_metrics import resolve

from shared.metrics.functions import DEFAULTS


@pytest.mark.parametrize("kind", DEFAULTS)
def test_the_default_metrics_of_each_kind_are_computed_in_order(kind: str) -> None:
    metrics = resolve(kind, classes=10 if kind == "image_classification" else 3)
    true = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 1]]) if kind == "multi_label" else np.array([0, 1, 2])
    ranked = np.array([[0, 1, 2], [1, 2, 0], [2, 0, 1]])  # the most likely class first
    values = metrics.compute(ranked if kind == "image_classification" else true, true)
    assert tuple(values) == DEFAULTS[kind]
    perfect = {name: 0.0 if name == "mean_squared_error" else 1.0 for name in values}
    assert values == pytest.approx(perfect)
    assert metrics.names[0] == DEFAULTS[kind][0]


def test_metric_name_replaces_the_defaults_and_float32_predictions_are_not_rounded() -> None:
    metrics = resolve("regression", "mean_squared_error", classes=0)
    predictions = np.array([1.0000001, 3.0], dtype=np.float32)
    references = np.array([1.0, 3.0], dtype=np.float32)
    expected = float(np.mean((predictions.astype(np.float64) - references) ** 2))
    assert metrics.compute(predictions, references) == {"mean_squared_error": pytest.approx(expected, rel=1e-12, abs=0)}


def test_metrics_of_images_use_the_most_likely_class_and_the_probabilities() -> None:
    assert resolve("image_classification", classes=5).names == ("accuracy", "macro_f1")
    metrics = resolve("image_classification", "recall_of_class", "roc_auc", "top_5_accuracy", classes=6, **POSITIVE_B)
    true, scores = np.array([0, 1, 2, 3, 4, 5]), np.eye(6, dtype=np.float32)
    ranked = np.array([[0, 1, 2, 3, 4], [2, 1, 0, 3, 4], [2, 0, 1, 3, 4], [3, 0, 1, 2, 4], [4, 0, 1, 2, 3]])
    ranked = np.vstack([ranked, [[0, 1, 2, 3, 4]]])
    expected = {"recall_of_class": 0.0, "roc_auc": 1.0, "top_5_accuracy": pytest.approx(5 / 6)}
    assert metrics.compute(ranked, true, scores) == expected


POSITIVE_B = {"positive_label": "b"}


@pytest.mark.parametrize(
    ("names", "settings", "expected"),
    [
        (["f1_of_class"], {"classes": 3}, "--positive_label None: --metric_name f1_of_class is about one class of the"),
        (["pearson"], {}, "pearson does not fit classification with 2 labels: use one of accuracy, macro_f1"),
        (["acuracy"], {}, "nor a .py file or a folder NAME with NAME.py here; a metric from the Hub is code"),
        (["f1_of_class"], {"positive_label": "x"}, "one class of the data: use one of a, b"),
        (["accuracy"], POSITIVE_B, "--positive_label b has no effect: no metric of --metric_name accuracy needs it"),
        (["accuracy", "accuracy"], {}, "--metric_name accuracy accuracy: eval_accuracy would be computed twice"),
        (["roc_auc"], {"kind": "regression"}, "--metric_name roc_auc does not fit regression: use one of pearson"),
        (["top_5_accuracy"], {"kind": "image_classification", "classes": 5}, "does not fit image_classification with"),
    ],
)
def test_metrics_that_do_not_fit_the_task_or_the_flags_are_refused(
    names: list[str], settings: dict[str, Any], expected: str
) -> None:
    assert expected in runs.refusal(resolve, settings.pop("kind", "classification"), *names, **settings)


NO_AUC = "roc_auc cannot be computed (NaN): each row of the validation data has the same"
LEFT_OUT = "roc_auc is the mean over 2 of 3 classes: the others are in none or all rows of the validation data (c)"


@pytest.mark.parametrize(
    ("kind", "classes", "targets", "expected", "note"),
    [
        ("classification", 2, [0, 0, 0, 0], "nan", f"{NO_AUC} class"),
        ("multi_label", 2, [[0, 1]] * 4, "nan", f"{NO_AUC} labels"),
        ("classification", 3, [0, 0, 1, 1], 1.0, LEFT_OUT),
        ("classification", 2, [0, 1, 0, 1], 1.0, ""),
    ],
)
def test_metrics_that_the_validation_data_cannot_give_are_noted_before_training(
    kind: str, classes: int, targets: Any, expected: float, note: str
) -> None:
    metrics = resolve(kind, "roc_auc", "f1_of_class", classes=classes, targets=targets, **POSITIVE_B)
    true = np.array(targets)
    scores = (true if kind == "multi_label" else np.eye(classes)[true]).astype(np.float32)
    values = metrics.compute(true, true, scores)
    assert values["roc_auc"] == pytest.approx(float(expected), nan_ok=True)
    assert metrics.notes.get("note on --metric_name", "") == note
    lacks_b = kind == "classification" and 1 not in targets
    assert ("note on --positive_label" in metrics.notes) == lacks_b
    no_auc = {"roc_auc"} if expected == "nan" else set()
    assert set(metrics.undefined) == no_auc | ({"f1_of_class"} if lacks_b else set())
