"""The whole image recipe, called in this process: its outputs, model, optimizers, loss and data."""

import json

import pytest
import runs
import torch
from PIL import Image

from shared.config import options
from shared.models.optimizers import make_optimizer

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def recipe():
    return runs.load_recipe("image_classification")


@pytest.fixture
def train(recipe):
    """A function that trains a tiny classifier, with further flags."""
    return lambda output, *flags: runs.train(recipe, output, *runs.TINY_IMAGES, *flags)


def config_of(recipe, *flags):
    return options.parse(recipe.Config, [*map(str, (*runs.TINY_IMAGES, *flags))])


def model_of(recipe, *flags):
    return recipe.build_model(config_of(recipe, *flags), tuple("0123456789"))


def test_a_pretrained_model_keeps_its_weights_and_from_scratch_only_its_config(recipe, tmp_path):
    saved = model_of(recipe, "--seed", 5)
    saved.save_pretrained(tmp_path)
    pretrained = ["--model_name_or_path", tmp_path]
    old, new = model_of(recipe, *pretrained), model_of(recipe, *pretrained, "--from_scratch")
    saved = saved.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in old.state_dict().items())
    assert new.config.hidden_sizes == old.config.hidden_sizes
    assert not torch.equal(new.state_dict()["classifier.1.weight"], saved["classifier.1.weight"])


def test_new_residual_blocks_start_as_the_identity_and_the_rest_depends_on_the_seed(recipe):
    zeros = [name for name, p in model_of(recipe).named_parameters() if not p.any() and name.endswith("weight")]
    assert zeros == [f"resnet.encoder.stages.{i}.layers.0.layer.1.normalization.weight" for i in range(2)]
    deep = model_of(recipe, "--layer_type", "bottleneck", "--depths", 2, 1)
    assert sum(not p.any() for name, p in deep.named_parameters() if name.endswith("normalization.weight")) == 3
    ones = model_of(recipe, "--no_zero_init_last_norm").named_parameters()
    assert all(p.any() for name, p in ones if name.endswith("weight"))
    heads = [model_of(recipe, "--seed", seed).state_dict()["classifier.1.weight"] for seed in (0, 0, 1)]
    assert [torch.equal(heads[0], head) for head in heads] == [True, True, False]


def test_lars_scales_each_matrix_by_its_norm_over_that_of_its_gradient(recipe):
    """The first step, in which momentum has no effect, equals equation 6 of You et al. 2017."""
    model = model_of(recipe)
    optimizer = make_optimizer(model, config_of(recipe, "--optim", "lars", "--weight_decay", 0.01))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(pixel_values=torch.randn(4, 3, 16, 16)).logits.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        group["lr"] = 2.0
    optimizer.step()
    for name, p in model.named_parameters():
        w, g = before[name], gradients[name]
        rate = 1e-3 * w.norm() / (g.norm() + 0.01 * w.norm()) if p.ndim >= 2 else 1.0
        decay = 0.01 if p.ndim >= 2 else 0.0
        assert torch.allclose(p, w - 2.0 * rate * (g + decay * w), rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize(("rule", "expected"), [("linear", 0.4), ("sqrt", 0.2), ("none", 0.1)])
def test_the_learning_rate_scales_with_the_batch_size_relative_to_256(recipe, rule, expected):
    config = config_of(recipe, "--scale_learning_rate", rule, "--global_batch_size", 1024, "--learning_rate", 0.1)
    assert config.peak_learning_rate() == pytest.approx(expected)


def test_class_weights_give_torchs_loss_of_the_whole_global_batch(recipe, train, tmp_path, monkeypatch, capsys):
    weights = torch.linspace(0.5, 5, 10)
    seen, compute = [], recipe.mixed_cross_entropy

    def record(logits, labels, *args, **settings):
        seen.append((logits.detach(), labels))
        return compute(logits, labels, *args, **settings)

    monkeypatch.setattr(recipe, "mixed_cross_entropy", record)
    flags = ["--max_train_steps", 1, "--global_batch_size", 40, "--per_device_train_batch_size", 20]
    flags += ["--class_weights", *weights.tolist(), "--label_smoothing", 0.1]
    train(tmp_path / "run", *flags)
    assert "class weights 0 0.5, 1 1, 2 1.5" in " ".join(capsys.readouterr().out.split())
    step_logits, targets = (torch.cat(part) for part in zip(*seen[-2:], strict=True))
    expected = torch.nn.CrossEntropyLoss(weights, label_smoothing=0.1)(step_logits, targets).item()
    assert runs.training_lines(tmp_path / "run")[0]["loss"] == pytest.approx(expected, rel=1e-6)


def test_images_in_a_users_folders_are_read_in_worker_processes(train, tmp_path):
    for label, color in (("dark", 20), ("light", 220)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(12):
            Image.new("L", (30, 20), color + i).save(tmp_path / "images" / label / f"{i}.jpg")
    flags = ["--train_dir", tmp_path / "images", "--validation_split_percentage", 25, "--global_batch_size", 16]
    flags += ["--metric_name", "accuracy", "roc_auc", "f1_of_class", "--positive_label", "dark"]
    results = train(tmp_path / "run", *flags, "--dataloader_num_workers", 1, "--max_train_steps", 12)
    assert [*results] == ["eval_loss", "eval_accuracy", "eval_roc_auc", "eval_f1_of_class"]
    assert results["eval_accuracy"] == results["eval_roc_auc"] == results["eval_f1_of_class"] == 1
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["id2label"] == {"0": "dark", "1": "light"}


# Each step fits one micro-batch, so that two processes cut it; an epoch ends with a step of fewer samples.
CUT = [
    *(*runs.TINY_IMAGES, "--per_device_train_batch_size", 48, "--max_train_samples", 200, "--max_train_steps", "None"),
    *("--num_train_epochs", 2, "--checkpointing_steps", 2, "--save_total_limit", "None"),
]


def test_a_run_with_batch_norm_that_goes_on_with_fewer_processes_keeps_its_micro_batches(tmp_path, capsys):
    whole = runs.run_many(2, {"whole": CUT}, tmp_path, recipe="recipes/image_classification.py")["whole"]
    resumed, checkpoint = tmp_path / "resumed", whole / "checkpoints/step_00000002"
    runs.train("image_classification", resumed, *CUT, "--resume_from_checkpoint", checkpoint)
    assert runs.distance(runs.weights(resumed), runs.weights(whole)) < 1e-5
    said = capsys.readouterr().out
    assert "resumed on 1 process, saved on 2: equal up to rounding" in " ".join(said.split())
    assert "as on the 2 processes of the first launch" in said
    assert {line["processes"] for line in runs.training_lines(whole)} == {2}
    assert {line["processes"] for line in runs.training_lines(resumed)} == {1}
