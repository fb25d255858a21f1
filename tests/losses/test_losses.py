"""With class weights and label smoothing, training uses torch's CrossEntropyLoss; evaluation uses the plain loss."""

import numpy as np
import pytest
import runs
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch.nn import functional as F

from shared.config import options
from shared.errors import UserError
from shared.losses import losses
from shared.plan.batches import Plan
from shared.pretrained.from_pretrained import load_pretrained
from shared.text.tokenized import Padding

NAMES = ("a", "b", "c")
CPU = torch.device("cpu")
RATE = 100.0  # large compared with the weights, so that their change gives the gradient
ONE_STEP = [
    *("--optim", "sgd", "--learning_rate", RATE, "--weight_decay", 0, "--max_grad_norm", 0, "--warmup_steps", 0),
    *("--lr_scheduler_type", "constant", "--max_train_steps", 1, "--eval_steps", 1, "--checkpointing_steps", "no"),
]


def shape(kind="classification", targets=(0, 0, 0, 1, 1, 2), **settings):
    return losses.shape_of_run(losses.LossOptions(**settings), kind, NAMES, np.array(targets), CPU)


def vector(tensors):
    return torch.cat([tensor.flatten().double() for _, tensor in sorted(tensors)])


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_step_uses_the_gradient_of_torchs_weighted_and_smoothed_loss_of_the_whole_batch(
    texts, tmp_path, one_cpu_process_without_a_picture, pieces, capsys
):
    weights = (0.5, 2.5, 1.0, 3.7)
    nlp = runs.load_recipe("nlp")
    cut = ["--micro_batches_per_step", pieces, "--max_tokens_per_micro_batch", 10_000]
    shaped = ["--class_weights", *weights, "--label_smoothing", 0.1]
    flags = [*texts, *runs.TINY, *ONE_STEP, *cut, *shaped, "--output_dir", tmp_path / "run"]
    config = options.parse(nlp.Config, [*map(str, flags)])
    results = nlp.main(config)
    assert "class weights asyncio 0.5, email 2.5, unittest 1, xml 3.7" in " ".join(capsys.readouterr().out.split())

    train, validation, labels, tokenizer = nlp.load_data(config)
    model = nlp.build_model(config, labels, tokenizer)
    before = vector(model.state_dict().items())
    plan = Plan(lengths=train.lengths, seed=0, global_batch_size=12, max_steps=1, micro_batches=pieces)
    assert len(plan.cut(0)) == pieces
    batch = Padding(tokenizer.pad_token_id)([train[i] for i in plan.global_batch(0)[0]])
    targets = batch.pop("labels")
    loss = torch.nn.CrossEntropyLoss(torch.tensor(weights), label_smoothing=0.1)(model(**batch).logits, targets)
    loss.backward()
    gradient = vector((name, p.grad) for name, p in model.named_parameters())
    moved = runs.weights(tmp_path / "run") - before
    assert runs.distance(moved / (-1.9 * RATE), gradient) < 1e-6  # 1.9: the first step of Nesterov momentum
    assert runs.training_lines(tmp_path / "run")[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)

    trained = load_pretrained("AutoModelForSequenceClassification", str(tmp_path / "run/model")).eval()
    batch = Padding(tokenizer.pad_token_id)([validation[i] for i in range(len(validation))])
    with torch.inference_mode():
        plain = F.cross_entropy(trained(**batch).logits, batch["labels"])
    assert results["eval_loss"] == pytest.approx(plain.item(), rel=1e-4)


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
    with pytest.raises(UserError) as refused:
        shape(**settings)
    assert expected in str(refused.value)
    assert "\n" not in str(refused.value)


def test_label_smoothing_must_be_at_least_0_and_below_1():
    with pytest.raises(UserError, match=r"--label_smoothing 1\.5: must be at least 0 and below 1"):
        options.check(losses.LossOptions(label_smoothing=1.5))
