"""A run is decided by its config, data and seed: the same numbers on 1, 2 and 3 processes, and under any budget.

Three launches of the recipe, with all configs in each; the tests compare what they left. The numbers are those that
docs/exactness.md promises, in float32.
"""

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from torch.nn import functional as F

from shared.config import options
from shared.plan.batches import Plan

WORLDS = (1, 2, 3)
BUDGETS = (48, 96, 576)  # rows x longest row, at most 12 x 48: a step in twelve, eight and one micro-batches
TWENTY_STEPS = ["--max_train_steps", 20, "--eval_steps", 20, "--logging_steps", 1, "--checkpointing_steps", "no"]
# The first step of SGD with Nesterov momentum moves the weights by 1.9 x learning rate x gradient; with this rate the
# move is so large beside the weights that their difference gives the gradient to nearly all its digits.
SGD_RATE = 100.0
ONE_STEP = [
    *("--optim", "sgd", "--learning_rate", SGD_RATE, "--weight_decay", 0, "--max_grad_norm", 0, "--warmup_steps", 0),
    *("--lr_scheduler_type", "constant", "--max_train_steps", 1, "--checkpointing_steps", "no"),
]
CLASS_WEIGHTS = (0.5, 2.5, 1.0, 3.7)
EPOCHS_ROWS, EPOCHS_BATCH = 23, 5  # two epochs are nine steps of 5 and one of a single row, whatever the processes


@pytest.fixture(scope="module")
def configs(texts, tmp_path_factory):
    """The command lines of the runs, by name."""
    folder = tmp_path_factory.mktemp("exactness")
    tiny = [*texts, *runs.TINY]
    epochs = write_numbered_texts(folder)
    bert = ["--model_name_or_path", runs.write_bert_with_dropout(folder / "bert", texts), "--learning_rate", 1e-3]
    return {
        **{f"gradient-{budget}": [*tiny, *ONE_STEP, "--max_tokens_per_micro_batch", budget] for budget in BUDGETS},
        **{f"adam-{budget}": [*tiny, *TWENTY_STEPS, "--max_tokens_per_micro_batch", budget] for budget in BUDGETS},
        "weighted": [*tiny, *ONE_STEP, "--class_weights", *CLASS_WEIGHTS, "--label_smoothing", 0.1],
        "dropout": [*tiny, *TWENTY_STEPS, *bert],
        "dropout-cut-otherwise": [*tiny, *TWENTY_STEPS, *bert, "--max_tokens_per_micro_batch", 48],
        "epochs": [
            *(*epochs, *runs.TINY, "--max_train_steps", "None", "--num_train_epochs", 2, "--eval_steps", "None"),
            *("--global_batch_size", EPOCHS_BATCH, "--logging_steps", 1),
        ],
        "evaluation": [*tiny, *bert, "--metric_name", *["accuracy", "macro_f1", "matthews_correlation", "roc_auc"]],
    }


@pytest.fixture(scope="module")
def outputs(configs, tmp_path_factory):
    """{processes: {name: output folder}}, from one launch for each number of processes."""
    folder = tmp_path_factory.mktemp("launches")
    modes = {"epochs": "record", "evaluation": "evaluate"}
    shared = {name: flags for name, flags in configs.items() if name != "dropout-cut-otherwise"}
    return {world: runs.run_many(world, configs if world == 1 else shared, folder, modes=modes) for world in WORLDS}


@pytest.fixture(scope="module")
def recipe():
    return runs.load_recipe("nlp")


def write_numbered_texts(folder):
    """23 rows of different lengths, each with a text of its own, and 7 to validate."""
    flags = []
    for flag, rows in (("train", range(EPOCHS_ROWS)), ("validation", range(100, 107))):
        lines = [f"{'even' if i % 2 == 0 else 'odd'},{' '.join([f'row number {i}'] * (1 + i % 4))}" for i in rows]
        file = folder / f"{flag}.csv"
        file.write_text("\n".join(["label,text", *lines]) + "\n")
        flags += [f"--{flag}_file", file]
    return flags


def plan_of(recipe, flags, **processes):
    """(config, training data, validation data, labels, tokenizer, plan) of a run."""
    config = options.parse(recipe.Config, list(map(str, flags)))
    train, validation, labels, tokenizer = recipe.load_data(config)
    world = {"num_processes": 1, "process_index": 0, "is_fsdp2": False} | processes
    plan = Plan.of_run(config, SimpleNamespace(**world), lengths=train.lengths)
    return config, train, validation, labels, tokenizer, plan


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_gradient_of_a_step_is_that_of_one_full_batch_pass(recipe, configs, outputs, budget):
    config, train, _, labels, tokenizer, plan = plan_of(recipe, configs[f"gradient-{budget}"])
    model = recipe.build_model(config, labels, tokenizer)
    before = state_vector(model)
    samples, _ = plan.global_batch(0)
    assert len(plan.cut(0)) == {48: 12, 96: 8, 576: 1}[budget]
    batch = recipe.Padding(tokenizer.pad_token_id)([train[i] for i in samples])
    targets = batch.pop("labels")
    F.cross_entropy(model(**batch).logits, targets).backward()
    expected = torch.cat([p.grad.flatten().double() for _, p in sorted(model.named_parameters())])
    assert len(expected) == len(before)
    for world in WORLDS:
        moved = runs.weights(outputs[world][f"gradient-{budget}"]) - before
        assert runs.distance(moved / (-1.9 * SGD_RATE), expected) < 1e-6, f"{world} processes"


def test_the_gradient_under_class_weights_is_that_of_torchs_loss_on_the_full_batch(recipe, configs, outputs):
    config, train, _, labels, tokenizer, plan = plan_of(recipe, configs["weighted"])
    model = recipe.build_model(config, labels, tokenizer)
    before = state_vector(model)
    batch = recipe.Padding(tokenizer.pad_token_id)([train[i] for i in plan.global_batch(0)[0]])
    targets = batch.pop("labels")
    loss = torch.nn.CrossEntropyLoss(torch.tensor(CLASS_WEIGHTS), label_smoothing=0.1)
    loss(model(**batch).logits, targets).backward()
    expected = torch.cat([p.grad.flatten().double() for _, p in sorted(model.named_parameters())])
    for world in WORLDS:
        moved = runs.weights(outputs[world]["weighted"]) - before
        assert runs.distance(moved / (-1.9 * SGD_RATE), expected) < 1e-6, f"{world} processes"


def state_vector(model):
    return torch.cat([tensor.flatten().double() for _, tensor in sorted(model.state_dict().items())])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_weights_after_twenty_steps_are_those_of_one_process_and_one_budget(outputs, world, budget):
    one = runs.weights(outputs[1]["adam-576"])
    assert runs.distance(runs.weights(outputs[world][f"adam-{budget}"]), one) < 1e-5


def test_with_dropout_the_weights_do_not_depend_on_the_number_of_processes(recipe, configs, outputs):
    *_, plan = plan_of(recipe, configs["dropout"], num_processes=3)
    assert not any(plan.refined(step) for step in range(20))
    assert min(len(plan.cut(step)) for step in range(20)) >= 3
    assert "cut finer than the config asks" not in said_of(outputs, 3, "dropout")
    one, two, three = (runs.weights_that_learn(outputs[world]["dropout"]) for world in WORLDS)
    assert runs.distance(two, one) < 1e-5
    assert runs.distance(three, one) < 1e-5


def test_dropout_is_on_and_other_masks_would_be_seen(outputs):
    """The same samples in the same steps, cut otherwise: all that differs are the masks."""
    same, otherwise = outputs[1]["dropout"], outputs[1]["dropout-cut-otherwise"]
    assert runs.distance(runs.weights(otherwise), runs.weights(same)) > 1e-3
    samples = [[line["samples"] for line in runs.training_lines(output)] for output in (same, otherwise)]
    assert samples[0] == samples[1]


def said_of(outputs, world, name):
    """The launch card of a run, out of what its launch printed."""
    folder = outputs[world][name]
    cards = (folder.parent / f"said-{world}.txt").read_text().split("  processes ")
    return next(card for card in cards if f"{folder}, " in card)


@pytest.mark.parametrize("name", [*(f"adam-{budget}" for budget in BUDGETS), "dropout", "epochs"])
def test_metrics_tell_the_same_story_on_any_number_of_processes(outputs, name):
    one = runs.training_lines(outputs[1][name])
    assert len(one) == (10 if name == "epochs" else 20)
    assert one[0]["loss"] > 1.05 * one[-1]["loss"] or name == "dropout"
    for world in (2, 3):
        other = runs.training_lines(outputs[world][name])
        for key in ("step", "samples", "learning_rate", "skipped_updates"):
            assert [line[key] for line in other] == [line[key] for line in one], key
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in other] == pytest.approx([line[key] for line in one], rel=1e-4), key


def test_every_row_enters_the_model_once_per_epoch(recipe, configs, outputs):
    """Read back from the token ids that went into forward passes, in training and in evaluation."""
    for world in WORLDS:
        _, train, validation, *_, plan = plan_of(recipe, configs["epochs"], num_processes=world)
        rows = {tuple(train[i][0].tolist()): i for i in range(len(train))}
        assert len(rows) == EPOCHS_ROWS
        evaluated, trained, processes = Counter(), Counter(), 0
        for file in sorted(outputs[world]["epochs"].glob("fed-*.jsonl")):
            passes = [json.loads(line) for line in file.read_text().splitlines()]
            training = [p["rows"] for p in passes if p["training"]]
            trained.update(rows[tuple(ids)] for batch in training[2:] for ids in batch)  # two are discarded
            evaluation = [p["rows"] for p in passes if not p["training"]]
            evaluated.update(
                tuple(ids) for batch in evaluation[2:] for ids in batch
            )  # two look whether padding is seen
            processes += 1
        assert processes == world
        (alone,), _ = plan.global_batch(plan.total_steps - 1)
        # The last step has one row: the other processes repeat it without weight, as the weights below prove.
        assert trained == Counter(dict.fromkeys(range(EPOCHS_ROWS), 2)) + Counter({alone: world - 1})
        assert evaluated == Counter({tuple(validation[i][0].tolist()): 2 for i in range(7)})
        assert runs.distance(runs.weights(outputs[world]["epochs"]), runs.weights(outputs[1]["epochs"])) < 1e-5


def mean_auc(truth, probabilities):
    """Mean over the classes that some of the rows are of, and some are not."""
    from sklearn.metrics import roc_auc_score

    found = {label for label in truth if len(set(truth)) > 1}
    return np.mean([roc_auc_score(truth == label, probabilities[:, label]) for label in found]) if found else math.nan


@pytest.mark.filterwarnings("ignore:A single label was found")  # scikit-learn's remark on data sets of one row
def test_evaluation_equals_scikit_learn_on_every_size_and_number_of_processes(recipe, configs, outputs):
    from sklearn.metrics import accuracy_score, f1_score, log_loss, matthews_corrcoef

    config, _, validation, labels, tokenizer, _ = plan_of(recipe, configs["evaluation"])
    model = recipe.build_model(config, labels, tokenizer).eval()
    collate = recipe.Padding(tokenizer.pad_token_id)
    with torch.inference_mode():  # one row at a time: no padding, no batches
        batches = [collate([validation[i]]) for i in range(len(validation))]
        logits = torch.cat([model(**{k: v for k, v in b.items() if k != "labels"}).logits for b in batches])
    predictions, probabilities = logits.argmax(1).numpy(), logits.double().softmax(1).numpy()
    assert len(set(predictions[:25])) > 2, "predictions that are all alike prove little"
    for world in WORLDS:
        found = json.loads((outputs[world]["evaluation"] / "evaluations.json").read_text())
        assert list(map(int, found)) == list(range(1, 2 * world * 4 + 2))
        for size, results in ((int(size), results) for size, results in found.items()):
            truth, said = validation.targets[:size], predictions[:size]
            assert results == pytest.approx(
                {
                    "eval_loss": log_loss(truth, probabilities[:size], labels=range(labels.num_labels)),
                    "eval_accuracy": accuracy_score(truth, said),
                    "eval_macro_f1": f1_score(truth, said, average="macro"),
                    "eval_matthews_correlation": matthews_corrcoef(truth, said),
                    "eval_roc_auc": mean_auc(truth, probabilities[:size]),
                },
                nan_ok=True,
                rel=1e-5,
                abs=1e-6,
            ), (world, size)
            assert math.isfinite(results["eval_loss"])
