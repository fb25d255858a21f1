"""The same config, data and seed give the same numbers on 1, 2 and 3 processes and with any budget.

Each recipe is launched once for each number of processes. A launch runs all configs; the tests compare the outputs.
The tolerances are those of docs/exactness.md, in float32.
"""

import functools
import json
import math
import shutil
from collections import Counter
from types import SimpleNamespace

import exact_runs
import numpy as np
import pytest
import runs
import torch
from exact_runs import ALONE, BUDGETS, CLASS_WEIGHTS, EPOCHS_ROWS, GROWS, IMAGES, assert_moved_by, gradient_of, vector
from one_text_at_a_time import loss_of
from safetensors.torch import load_file
from torch.nn import functional as F

from shared.plan.batches import Plan
from shared.text.tokenized import Padding

WORLDS = (1, 2, 3)


NLP = (*(f"{what}-{budget}" for what in ("gradient", "adam") for budget in BUDGETS), "weighted", "epochs", "evaluation")
NLP += ("dropout", "rows", "rows-dropout")
RUNS = {  # recipe: {processes: its runs}, in the order of the launches
    "nlp": {1: (*NLP, "dropout-cut-otherwise"), 2: NLP, 3: NLP},
    "mlm": {1: ("gradient", "adam", "rows", "one-micro-batch"), 2: ("gradient", "adam"), 3: ("gradient", "adam")},
    "embeddings": {
        1: ("adam", "rows", "dropout", "static", "scored", "scored-in-one-pass"),
        2: ("adam", "dropout", "static", "scored"),
        3: ("adam", "gradient", "scored"),
    },
    "image_classification": {2: ("dropout", "begun"), 1: ("dropout", "stayed"), 3: ("dropout", "moved")},
}
MODES = {"nlp": {"epochs": "record", "evaluation": "evaluate"}, "image_classification": {"dropout": "dropout"}}


@pytest.fixture(scope="module")
def configs(texts, tmp_path_factory):
    """{recipe: {name: command line}}."""
    nlp = exact_runs.nlp_runs(texts, tmp_path_factory.mktemp("exactness"))
    embeddings = exact_runs.embedding_runs(texts, tmp_path_factory.mktemp("tuples"))
    images = {"begun": 6, "stayed": 12, "moved": 12}
    images = {name: [*GROWS, "--max_train_steps", steps] for name, steps in images.items()}
    found = {"nlp": nlp, "mlm": exact_runs.mlm_runs(texts), "embeddings": embeddings}
    return found | {"image_classification": images | {"dropout": IMAGES}}


@pytest.fixture(scope="module")
def outputs(configs, tmp_path_factory):
    """A function of a recipe: {processes: {name: output folder}}, from one launch for each number of processes.

    The run "moved" of images resumes on three processes the run "begun" on two.
    """

    @functools.cache
    def of(recipe):
        folder, found = tmp_path_factory.mktemp(recipe), {}
        for world, names in RUNS[recipe].items():
            if "moved" in names:
                shutil.copytree(folder / "begun-2", folder / "moved-3")
            chosen = {name: configs[recipe][name] for name in names}
            found[world] = runs.run_many(world, chosen, folder, f"recipes/{recipe}.py", MODES.get(recipe))
        return found

    return of


# Any recipe

ADAM = [("nlp", world, f"adam-{budget}", "adam-576") for budget in BUDGETS for world in WORLDS]
ADAM += [("nlp", world, "rows", "adam-576") for world in WORLDS]
ADAM += [("nlp", world, name, name) for name in ("dropout", "rows-dropout", "epochs") for world in (2, 3)]
ADAM += [("mlm", 2, "adam", "adam"), ("mlm", 3, "adam", "adam")]
ADAM += [("mlm", 1, "rows", "adam"), ("mlm", 1, "one-micro-batch", "adam")]
ADAM += [("embeddings", 2, "adam", "adam"), ("embeddings", 3, "adam", "adam"), ("embeddings", 1, "rows", "adam")]
ADAM += [("embeddings", 2, "dropout", "dropout"), ("embeddings", 2, "static", "static")]
ADAM += [("embeddings", 1, "scored-in-one-pass", "scored")]
ADAM += [("embeddings", world, "scored", "scored") for world in (2, 3)]


@pytest.mark.parametrize(("recipe", "world", "name", "reference"), ADAM)
def test_losses_and_weights_of_twenty_steps_are_equal_for_all_numbers_of_processes_budgets_and_packing(
    outputs, recipe, world, name, reference
):
    found, expected = outputs(recipe)[world][name], outputs(recipe)[1][reference]
    assert runs.distance(runs.weights_that_learn(found), runs.weights_that_learn(expected)) < 1e-5
    losses = [[line["loss"] for line in runs.training_lines(each)] for each in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


STORIES = [("nlp", name) for name in (*(f"adam-{budget}" for budget in BUDGETS), "dropout", "rows", "epochs")]
STORIES += [("mlm", "adam"), ("image_classification", "dropout"), ("embeddings", "adam"), ("embeddings", "scored")]


@pytest.mark.parametrize(("recipe", "name"), STORIES)
def test_metrics_are_equal_on_any_number_of_processes(outputs, recipe, name):
    def values(world, key):
        return [line[key] for line in runs.metrics(outputs(recipe)[world][name]) if key in line]

    losses = values(1, "loss")
    assert len(losses) == (10 if name == "epochs" else 20)
    assert losses[0] > 1.05 * losses[-1] or name == "dropout"
    close = ["loss", "grad_norm", "eval_loss"]
    close += ["eval_accuracy", "eval_top_5_accuracy", "eval_macro_f1"] if recipe == "image_classification" else []
    retrieved = ["eval_ndcg_at_10", "eval_recall_at_10", "eval_mrr_at_10"]
    close += retrieved if (recipe, name) == ("embeddings", "adam") else []
    close += ["eval_spearman", "eval_pearson", "eval_spearman_dim_8"] if name == "scored" else []
    for world in (2, 3):
        for key in ("step", "samples", "learning_rate", "skipped_updates"):
            assert values(world, key) == values(1, key), key
        for key in close:
            assert values(1, key), key
            assert values(world, key) == pytest.approx(values(1, key), rel=1e-4), key


# Texts


def plan_of(nlp, flags, **processes):
    """(config, training data, validation data, labels, tokenizer, plan) of a run."""
    config, train, validation, labels, tokenizer = runs.prepared(nlp, flags)
    world = SimpleNamespace(**vars(ALONE) | processes)
    plan = Plan.of_run(config, world, lengths=train.lengths, packed=config.packing)
    return config, train, validation, labels, tokenizer, plan


@pytest.mark.parametrize("name", [*(f"gradient-{budget}" for budget in BUDGETS), "weighted"])
def test_the_gradient_of_a_step_equals_that_of_torchs_loss_in_one_pass_over_the_full_batch(nlp, configs, outputs, name):
    config, train, _, labels, tokenizer, plan = plan_of(nlp, configs["nlp"][name])
    model = nlp.build_model(config, labels, tokenizer)
    before = vector(model.state_dict())
    assert len(plan.cut(0)) == {"gradient-48": 12, "gradient-576": 1}.get(name, 8)
    batch = Padding(tokenizer.pad_token_id)([train[i] for i in plan.global_batch(0)[0]])
    targets = batch.pop("labels")
    settings = {"weight": torch.tensor(CLASS_WEIGHTS), "label_smoothing": 0.1} if name == "weighted" else {}
    loss = torch.nn.CrossEntropyLoss(**settings)(model(**batch).logits, targets)
    loss.backward()
    expected = gradient_of(model)
    assert runs.training_lines(outputs("nlp")[1][name])[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert len(expected) == len(before)
    assert_moved_by({world: outputs("nlp")[world][name] for world in WORLDS}, before, expected)


@pytest.mark.parametrize("name", ["dropout", "rows-dropout", "weighted"])
def test_the_evaluation_has_the_plain_loss_of_each_text_alone_and_packed_texts_no_padding(outputs, texts, name):
    """Also in a run with class weights and label smoothing."""
    output = outputs("nlp")[1][name]
    expected = loss_of(output / "model", texts[3])
    assert runs.evaluation(output)["eval_loss"] == pytest.approx(expected, rel=1e-4 if name == "weighted" else 1e-5)
    padding = [line["padding"] for line in runs.training_lines(output)]
    assert (max(padding) > 0) == (name == "rows-dropout")
    said = said_of(outputs, 1, name)
    assert ("packed without padding, attention over documents padded to" in said) == (name != "rows-dropout")


def test_dropout_is_on_and_other_masks_change_the_weights(outputs):
    """The same samples in the same steps, in other micro-batches: only the dropout masks differ."""
    same, otherwise = outputs("nlp")[1]["dropout"], outputs("nlp")[1]["dropout-cut-otherwise"]
    assert runs.distance(runs.weights(otherwise), runs.weights(same)) > 1e-4
    samples = [[line["samples"] for line in runs.training_lines(output)] for output in (same, otherwise)]
    assert samples[0] == samples[1]


def said_of(outputs, world, name):
    """The launch card of a run, from the output of its launch."""
    folder = outputs("nlp")[world][name]
    cards = (folder.parent / f"output-{world}.txt").read_text().split("  processes ")
    return next(card for card in cards if f"{folder}, " in card)


def test_every_row_enters_the_model_once_per_epoch(nlp, configs, outputs):
    """In training and in evaluation; the rows are known by the token ids that enter the forward passes."""
    for world in WORLDS:
        _, train, validation, *_, plan = plan_of(nlp, configs["nlp"]["epochs"], num_processes=world)
        rows = {tuple(train[i][0].tolist()): i for i in range(len(train))}
        assert len(rows) == EPOCHS_ROWS
        evaluated, trained = Counter(), Counter()
        for rank in range(world):
            file = outputs("nlp")[world]["epochs"] / f"fed-{rank}.jsonl"
            passes = [json.loads(line) for line in file.read_text().splitlines()]
            training = [place for place, p in enumerate(passes) if p["training"]]
            counted = sum(len(plan.micro_batches_of_all(step)[rank]) for step in range(plan.total_steps))
            assert counted + 5 <= len(training) <= counted + 6  # those before the first step are discarded
            trained.update(rows[tuple(ids)] for place in training[-counted:] for ids in passes[place]["rows"])
            evaluation = [p["rows"] for p in passes[training[-counted] :] if not p["training"]]
            evaluated.update(tuple(ids) for batch in evaluation for ids in batch)
        (alone,), _ = plan.global_batch(plan.total_steps - 1)
        # The last step has one row: the other processes repeat it without weight, as the weights above prove.
        assert trained == Counter(dict.fromkeys(range(EPOCHS_ROWS), 2)) + Counter({alone: world - 1})
        assert evaluated == Counter(tuple(validation[i][0].tolist()) for i in range(len(validation)) for _ in range(2))


def mean_auc(truth, probabilities):
    """The mean over the classes that some rows have and others do not."""
    from sklearn.metrics import roc_auc_score

    found = {label for label in truth if len(set(truth)) > 1}
    return np.mean([roc_auc_score(truth == label, probabilities[:, label]) for label in found]) if found else math.nan


@pytest.mark.filterwarnings("ignore:A single label was found")  # scikit-learn's warning about data sets of one row
def test_evaluation_equals_scikit_learn_on_every_size_and_number_of_processes(nlp, configs, outputs):
    from sklearn.metrics import accuracy_score, f1_score, log_loss, matthews_corrcoef

    config, _, validation, labels, tokenizer, _ = plan_of(nlp, configs["nlp"]["evaluation"])
    model = nlp.build_model(config, labels, tokenizer).eval()
    collate = Padding(tokenizer.pad_token_id)
    with torch.inference_mode():  # one row at a time: no padding, no batches
        batches = [collate([validation[i]]) for i in range(len(validation))]
        logits = torch.cat([model(**{k: v for k, v in b.items() if k != "labels"}).logits for b in batches])
    predictions, probabilities = logits.argmax(1).numpy(), logits.double().softmax(1).numpy()
    assert len(set(predictions[:25])) > 2, "the test needs at least three predicted classes"
    for world in WORLDS:
        found = json.loads((outputs("nlp")[world]["evaluation"] / "evaluations.json").read_text())
        assert list(map(int, found)) == list(range(1, 2 * world * 4 + 2))
        for size, results in ((int(size), results) for size, results in found.items()):
            truth, predicted = validation.targets[:size], predictions[:size]
            assert results == pytest.approx(
                {
                    "eval_loss": log_loss(truth, probabilities[:size], labels=range(labels.num_labels)),
                    "eval_accuracy": accuracy_score(truth, predicted),
                    "eval_macro_f1": f1_score(truth, predicted, average="macro"),
                    "eval_matthews_correlation": matthews_corrcoef(truth, predicted),
                    "eval_roc_auc": mean_auc(truth, probabilities[:size]),
                },
                nan_ok=True,
                rel=1e-5,
                abs=1e-6,
            ), (world, size)
            assert math.isfinite(results["eval_loss"])


# Masked texts


def dense_losses(model, data, sample, epoch):
    """Loss and correctness [masked tokens] of one piece in a batch of its own, with logits for every token."""
    _, tokens, _, labels, masked = data.read_micro_batch(np.array([sample]), np.array([epoch]))
    logits = model(input_ids=torch.from_numpy(tokens)[None]).logits[0][torch.from_numpy(masked)]
    targets = torch.from_numpy(labels)
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(1) == targets


def test_the_gradient_of_an_mlm_step_equals_that_of_its_pieces_one_at_a_time_with_all_logits(mlm, configs, outputs):
    config, train, _, tokenizer = runs.prepared(mlm, configs["mlm"]["gradient"])
    model = mlm.build_model(config, tokenizer)
    before = vector(model.state_dict())
    assert not config.whole_word_masking
    samples, epochs = Plan.of_run(config, ALONE, lengths=train.lengths, packed=True).global_batch(0)
    pairs = zip(samples.tolist(), epochs.tolist(), strict=True)
    losses = torch.cat([dense_losses(model, train, *pair)[0] for pair in pairs])
    assert len(losses) == train.masked[samples].sum()
    losses.mean().backward()
    expected = gradient_of(model)
    assert_moved_by({world: outputs("mlm")[world]["gradient"] for world in WORLDS}, before, expected)


def test_the_mlm_evaluation_equals_that_of_its_pieces_one_at_a_time(mlm, configs, outputs):
    config, _, validation, tokenizer = runs.prepared(mlm, configs["mlm"]["adam"])
    model = mlm.build_model(config, tokenizer)
    weights = load_file(outputs("mlm")[1]["adam"] / "model/model.safetensors")
    assert set(model.state_dict()) - set(weights) == {"decoder.weight"}
    model.load_state_dict(weights, strict=False)
    with torch.inference_mode():
        each = [dense_losses(model.eval(), validation, i, 0) for i in range(len(validation))]
    losses, hits = (torch.cat(part).double() for part in zip(*each, strict=True))
    for world in WORLDS:
        found = runs.evaluation(outputs("mlm")[world]["adam"])
        assert found["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
        assert found["eval_accuracy"] == pytest.approx(hits.mean().item(), abs=1.5 / len(hits))
        assert found["eval_perplexity"] == pytest.approx(losses.mean().exp().item(), rel=1e-4)


def test_the_gradient_of_an_embeddings_step_equals_that_of_one_pass_over_the_full_batch(configs, outputs):
    recipe = runs.load_recipe("embeddings")
    config, train, _, tokenizer = runs.prepared(recipe, configs["embeddings"]["gradient"])
    model = recipe.build_model(config, tokenizer)
    before = vector(model.state_dict())
    samples, epochs = Plan.of_run(config, ALONE, lengths=train.lengths, packed=True).global_batch(0)
    rows = train.read_micro_batch(samples, epochs)
    anchors, positives = F.normalize(model(**Padding(tokenizer.pad_token_id)(rows)).logits, dim=1).chunk(2)
    ids, answers = (torch.from_numpy(train.digests_of(column)[samples]) for column in (0, 1))
    known = ((ids[:, None] == ids) | (answers[:, None] == answers)) & ~torch.eye(len(ids), dtype=torch.bool)
    assert known.any(), "the batch needs duplicates"
    scores = (anchors @ positives.T / config.temperature).masked_fill(known, -torch.inf)
    F.cross_entropy(scores, torch.arange(len(ids))).backward()
    assert_moved_by({3: outputs("embeddings")[3]["gradient"]}, before, gradient_of(model))


# Images


def tensors(output, statistics):
    """The running statistics of a model's batch norms, or everything else, as one vector."""
    saved = load_file(output / "model/model.safetensors")
    chosen = [name for name in sorted(saved) if ("running_" in name) == statistics and "num_batches" not in name]
    return torch.cat([saved[name].flatten().double() for name in chosen])


@pytest.fixture(scope="module")
def reference():
    return exact_runs.train_images_in_one_process()


@pytest.mark.parametrize("world", WORLDS)
def test_weights_and_running_statistics_equal_those_of_a_loop_in_one_process(outputs, reference, world):
    for expected, statistics in zip(reference, (False, True), strict=True):
        vector = torch.cat([expected[name].detach().flatten().double() for name in sorted(expected)])
        found = tensors(outputs("image_classification")[world]["dropout"], statistics)
        assert len(found) == len(vector)
        assert runs.distance(found, vector) < 1e-5
    saved = load_file(outputs("image_classification")[world]["dropout"] / "model/model.safetensors")
    counted = {int(value) for name, value in saved.items() if "num_batches" in name}
    assert counted == {exact_runs.IMAGE_STEPS}, "the micro-batches of one step count as one"


def test_a_run_resumed_on_three_processes_instead_of_two_ends_like_one_on_a_single_process(outputs):
    """It resumes halfway. The run exports a moving average of the weights and statistics."""
    found = outputs("image_classification")
    for statistics in (False, True):
        begun, stayed, moved = (
            tensors(output, statistics) for output in (found[2]["begun"], found[1]["stayed"], found[3]["moved"])
        )
        assert runs.distance(moved, stayed) < 1e-5
        assert runs.distance(begun, stayed) > 1e-3
    assert [line["step"] for line in runs.training_lines(found[3]["moved"])] == list(range(1, 13))
