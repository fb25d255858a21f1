"""With class weights and label smoothing, training uses torch's CrossEntropyLoss; evaluation uses the plain loss."""

import numpy as np
import pytest
import runs
import torch
from sklearn.utils.class_weight import compute_class_weight

from shared.losses import losses

NAMES = ("a", "b", "c")
CPU = torch.device("cpu")


def shape(kind="classification", targets=(0, 0, 0, 1, 1, 2), **settings):
    return losses.shape_of_run(losses.LossOptions(**settings), kind, NAMES, np.array(targets), CPU)


def test_balanced_weights_equal_those_of_scikit_learn_and_weigh_the_samples_of_the_plan():
    targets = np.array([0, 0, 0, 1, 1, 2])
    made = shape(class_weights=("balanced",), targets=targets)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=targets)
    assert made.cross_entropy["weight"].numpy() == pytest.approx(expected, rel=1e-6)
    weights = made.sample_weights[np.arange(6)]
    assert weights == pytest.approx(expected[targets], rel=1e-6)
    assert weights.dtype == np.float64  # its sum is nearly exactly that of the float32 weights
    assert "label_smoothing" not in made.cross_entropy


def test_without_the_settings_the_loss_is_the_plain_one():
    for kind in ("classification", "multi_label", "regression"):
        assert shape(kind) == losses.LossShape()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"class_weights": ("1", "2")}, "--class_weights 1 2: 2 weights for 3 classes: give one for each (a, b, c)"),
        ({"class_weights": ("1", "2", "many")}, "expected balanced, or a number for each class (a, b, c)"),
        ({"class_weights": ("balanced", "1", "2")}, "expected balanced, or a number for each class (a, b, c)"),
        ({"class_weights": ("1", "0", "2")}, "--class_weights 1 0 2: each weight must be above 0"),
        ({"class_weights": ("1", "nan", "2")}, "--class_weights 1 nan 2: each weight must be above 0"),
        ({"class_weights": ("1", "inf", "2")}, "--class_weights 1 inf 2: each weight must be above 0"),
        (
            {"class_weights": ("balanced",), "targets": (0, 0, 2)},
            "the training data has no sample of class b, whose weight",
        ),
        ({"class_weights": ("balanced",), "kind": "regression"}, "regression has no classes: leave it out"),
        ({"class_weights": ("1", "2", "3"), "kind": "multi_label"}, "here a text can have several: leave it out"),
        ({"label_smoothing": 0.1, "kind": "regression"}, "--label_smoothing 0.1 requires exactly one label per sample"),
        ({"label_smoothing": 0.1, "kind": "multi_label"}, "here a text can have several: leave it out"),
    ],
)
def test_settings_of_the_loss_that_do_not_fit_are_refused_in_one_line(settings, expected):
    assert expected in runs.refusal(shape, **settings)
