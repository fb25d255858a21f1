"""Class weights and label smoothing as in torch's CrossEntropyLoss; standardized targets of regression.

tests/recipes/test_tasks.py has complete runs.
"""

import numpy as np
import pytest
import runs
import torch
from families import CLASSIFIER, small, tiny
from sklearn.utils.class_weight import compute_class_weight
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from shared.datasets.labels import Labels
from shared.encoders.text_models import add_adapters
from shared.errors import UserError
from shared.losses import losses
from shared.losses.losses import Scale
from shared.options.text_options import TextLossOptions, TextOptions

NAMES = ("a", "b", "c")
CPU = torch.device("cpu")
NUMBERS, CLASSES = Labels("regression", ("price",)), Labels("classification", ("label",), ("a", "b"), ("0", "1"))
TARGETS = np.array([1e8, 3e8, 5e8, 2.5e8])


def shape(kind="classification", targets=(0, 0, 0, 1, 1, 2), **settings):
    return losses.shape_of_run(TextLossOptions(**settings), kind, NAMES, np.array(targets), CPU)


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


@pytest.mark.parametrize("given", ["1 2", "1 2 many", "balanced 1 2", "1 0 2", "1 nan inf"])
def test_weights_that_are_not_one_positive_number_for_each_class_are_refused(given):
    expected = f"--class_weights {given}: give balanced, or a number above 0 for each class (a, b, c)"
    assert runs.refusal(shape, class_weights=tuple(given.split())) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"class_weights": ("balanced",), "targets": (0, 0, 2)}, "the training data has no sample of class b, whose"),
        ({"class_weights": ("1", "2", "3"), "kind": "multi_label"}, "here a text can have several: leave it out"),
        ({"label_smoothing": 0.1, "kind": "regression"}, "but regression has no classes: leave it out"),
    ],
)
def test_settings_of_the_loss_that_do_not_fit_are_refused_in_one_line(settings, expected):
    assert expected in runs.refusal(shape, **settings)


def bert():
    return small("bert", vocab_size=20, hidden_size=8, num_hidden_layers=1, num_labels=1).eval()


def answer(model):
    with torch.no_grad():
        return model(torch.arange(6).view(2, 3)).logits.squeeze(1)


@pytest.mark.parametrize(("targets", "deviation"), [(TARGETS, TARGETS.std()), (np.full(5, 7e8), 1)])
def test_targets_are_standardized_and_restored_by_the_exported_model_itself(targets, deviation):
    model = bert()
    scale, outputs = Scale.of_run(NUMBERS, targets, model), answer(model)
    assert (scale.mean, scale.deviation) == pytest.approx((targets.mean(), deviation))
    inside = scale.standardize(torch.from_numpy(targets))
    assert inside.dtype == torch.float32
    assert inside.numpy() == pytest.approx((targets - targets.mean()) / deviation)
    assert scale.restore(inside).numpy() == pytest.approx(targets)
    scale.before_export(model)
    assert answer(model).numpy() == pytest.approx(scale.restore(outputs).numpy(), rel=1e-6)


def test_before_export_scales_the_exported_weights_of_a_sharded_model(tmp_path):
    model = bert()
    scale, before = Scale.of_run(NUMBERS, TARGETS, model), model.classifier.weight.detach().clone()
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        answer(model)  # leaves gathered weights behind
        scale.before_export(model)
        exported = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    finally:
        torch.distributed.destroy_process_group()
    assert torch.allclose(exported["classifier.weight"] / scale.deviation, before, rtol=1e-6)


def test_a_pretrained_last_layer_for_the_same_numbers_keeps_its_predictions():
    model = bert()
    Scale.of_run(NUMBERS, TARGETS, model).before_export(model)
    before = answer(model)
    model.knows_labels = True
    scale = Scale.of_run(NUMBERS, TARGETS * 3, model)
    assert abs(answer(model)).max() < 3
    assert scale.restore(answer(model)).numpy() == pytest.approx(before.numpy(), rel=1e-5)


def test_targets_that_are_classes_are_not_changed():
    model = bert()
    scale = Scale.of_run(CLASSES, np.array([0, 1]), model)
    targets = torch.tensor([0, 1])
    assert scale.standardize(targets) is targets
    assert scale.restore(targets) is targets
    assert (str(scale), scale.note, scale.deviation, scale.layer) == ("", "", 1, None)


@pytest.mark.parametrize(
    "model",
    [tiny(CLASSIFIER, "GPT-2", 20, num_labels=1), torch.nn.Linear(2, 1)],
    ids=["without a bias", "no transformers model"],
)
def test_a_model_that_cannot_be_scaled_is_refused_only_if_the_targets_need_it(model):
    with pytest.raises(UserError, match=r"--label_column_name price: the training targets have mean 2\.875e\+08 and"):
        Scale.of_run(NUMBERS, TARGETS, model)
    scale = Scale.of_run(NUMBERS, np.array([1.0, 4.5, 3.0]), model)
    assert (scale.mean, scale.deviation) == (0, 1)
    assert scale.standardize(torch.tensor([2.5], dtype=torch.float64)).equal(torch.tensor([2.5]))


def test_targets_that_float32_cannot_distinguish_are_refused():
    with pytest.raises(UserError, match=r"steps of 1\.3e\+02 there: subtract 1\.7e\+09 from the column"):
        Scale.of_run(NUMBERS, 1.7e9 + np.arange(100.0), bert())
    assert Scale.of_run(NUMBERS, 1.7e9 + 1e6 * np.arange(100.0), bert()).deviation > 1e7


def test_adapters_below_do_not_hide_the_last_layer():
    model = bert()
    add_adapters(TextOptions(model_name_or_path="base", lora_rank=2), model)
    assert Scale.of_run(NUMBERS, TARGETS, model).layer is model.classifier
