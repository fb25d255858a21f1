"""The recipe for token classification: the same run on 1, 2 and 3 processes and after an interruption, and its scores.

One launch for each number of processes runs all configs. The tolerances are those of docs/exactness.md, in float32.
"""

import json

import numpy as np
import pytest
import runs
import torch
import toy_data
from exact_runs import ALONE, ONE_STEP, TWENTY_STEPS, assert_moved_by, gradient_of, vector
from torch.nn import functional as F

from shared.plan.batches import Plan

# Half of the texts are longer than a window.
TINY = [*runs.TINY, "--max_length", "24", "--stride", "6", "--learning_rate", "1e-2"]
DROPPED = "\u200b"  # a word without pieces


@pytest.fixture(scope="module")
def recipe():
    return runs.load_recipe("token_classification")


@pytest.fixture(scope="module")
def tagged_texts(tmp_path_factory):
    """The flags of a small data set: functions of the standard library, whose names have roles."""
    rows = toy_data.tagged_rows()
    rows[3]["tokens"][1], rows[-1]["tokens"][2] = DROPPED, DROPPED
    return toy_data.write_tagged(tmp_path_factory.mktemp("tagged"), rows)


@pytest.fixture(scope="module")
def configs(tagged_texts, tmp_path_factory):
    """{name: command line}."""
    folder = tmp_path_factory.mktemp("bert") / "model"
    bert = toy_data.write_encoder_with_dropout(folder, "token_classification", tagged_texts)
    tiny = [*tagged_texts, *TINY]
    return {
        "gradient": [*tiny, *ONE_STEP],
        "adam": [*tiny, *TWENTY_STEPS],
        "dropout": [*tiny, *TWENTY_STEPS, "--model_name_or_path", bert, "--no_packing"],
    }


@pytest.fixture(scope="module")
def outputs(configs, tmp_path_factory):
    """{processes: {name: output folder}}."""
    folder = tmp_path_factory.mktemp("outputs")
    chosen = {1: ("gradient", "adam", "dropout"), 2: ("adam",), 3: ("gradient", "dropout")}
    configs = {world: {name: configs[name] for name in names} for world, names in chosen.items()}
    return {world: runs.run_many(world, configs[world], folder, "recipes/token_classification.py") for world in chosen}


@pytest.mark.parametrize(("name", "world"), [("adam", 2), ("dropout", 3)])
def test_the_run_is_the_same_on_any_number_of_processes(outputs, name, world):
    one, other = outputs[1][name], outputs[world][name]
    lines = runs.training_lines(one)
    assert len(lines) == 20
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert runs.distance(runs.weights_that_learn(other), runs.weights_that_learn(one)) < 1e-5
    assert [line["samples"] for line in runs.training_lines(other)] == [line["samples"] for line in lines]
    scores = [runs.evaluation(output) for output in (one, other)]
    assert {"eval_loss", "eval_f1", "eval_precision", "eval_recall", "eval_accuracy"} <= set(scores[0])
    assert scores[1]["eval_loss"] == pytest.approx(scores[0]["eval_loss"], rel=1e-5)
    assert scores[1]["eval_f1"] == pytest.approx(scores[0]["eval_f1"], abs=0.02)  # rounding may flip a close word


def losses_of_words(model, data, windows):
    """The loss and the predicted tag of each window's own words; one window at a time, with logits of all tokens."""
    losses, predicted = [], []
    for window in windows:
        _, tokens, _, tags, places = data.read_micro_batch(np.array([window]), np.zeros(1, int))
        logits = model(input_ids=torch.from_numpy(tokens)[None]).logits[0]
        losses.append(F.cross_entropy(logits[torch.from_numpy(places)], torch.from_numpy(tags), reduction="none"))
        predicted.append(logits.argmax(1)[torch.from_numpy(places)])
    return torch.cat(losses), torch.cat(predicted)


def test_the_gradient_of_a_step_is_that_of_the_mean_loss_of_all_words_of_the_global_batch(recipe, configs, outputs):
    config, train, _, tags, tokenizer = runs.prepared(recipe, configs["gradient"])
    model = recipe.build_model(config, tags, tokenizer)
    before = vector(model.state_dict())
    plan = Plan.of_run(config, ALONE, lengths=train.lengths, weights=train.num_words, packed=True)
    samples, _ = plan.global_batch(0)
    losses, _ = losses_of_words(model, train, samples)
    assert len(losses) == train.num_words[samples].sum() > 2 * len(samples)
    assert len(plan.cut(0)) > 1
    losses.mean().backward()
    assert_moved_by({world: outputs[world]["gradient"] for world in (1, 3)}, before, gradient_of(model))


def test_each_word_of_the_validation_texts_is_predicted_once_and_the_scores_are_those_of_seqeval(
    recipe, configs, outputs
):
    from seqeval import metrics as seqeval
    from transformers import AutoModelForTokenClassification

    _, _, validation, tags, _ = runs.prepared(recipe, configs["adam"])
    texts = [json.loads(line) for line in configs["adam"][3].read_text().splitlines()]
    assert len(validation) > len(texts), "some texts have several windows"
    model = AutoModelForTokenClassification.from_pretrained(outputs[1]["adam"] / "model").eval()
    with torch.inference_mode():
        losses, predicted = losses_of_words(model, validation, range(len(validation)))
    words = [word for text in texts for word in text["tokens"]]
    assert words.count(DROPPED) == 1
    assert len(losses) == len(words) - 1
    remaining = iter(predicted.tolist())
    guesses = [["O" if word == DROPPED else tags.names[next(remaining)] for word in text["tokens"]] for text in texts]
    true = [text["tags"] for text in texts]
    for world in (1, 2):
        found = runs.evaluation(outputs[world]["adam"])
        assert found["eval_loss"] == pytest.approx(losses.double().mean().item(), rel=1e-5)
        for name in ("f1", "precision", "recall", "accuracy"):
            expected = getattr(seqeval, f"{name}_score")(true, guesses)
            assert found[f"eval_{name}"] == pytest.approx(expected, abs=1e-9 if world == 1 else 0.02), name


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_the_pipeline_gives_the_reported_scores_by_the_first_pieces_of_words(recipe, tagged_texts, tmp_path, kind):
    """Of texts that fit into a window; both kinds of tokenizer cut a word as after a space."""
    from seqeval import metrics as seqeval
    from transformers import pipeline

    flags = ["--tokenizer_type", kind, "--max_length", 120, "--max_tokens_per_micro_batch", 500]
    results = runs.train(recipe, tmp_path / "run", *tagged_texts, *TINY, *flags, "--max_train_steps", 30)
    tagger = pipeline("token-classification", model=str(tmp_path / "run/model"), device="cpu")
    true, predicted = [], []
    for row in map(json.loads, tagged_texts[3].read_text().splitlines()):
        starts = np.cumsum([0, *(len(word) + 1 for word in row["tokens"])])
        tags = {}
        (pieces,) = tagger(row["tokens"], is_split_into_words=True, ignore_labels=[])
        for piece in pieces:
            word = int(np.searchsorted(starts, piece["start"], side="right")) - 1
            tags.setdefault(word, piece["entity"])
        true.append(row["tags"])
        predicted.append([tags.get(word, "O") for word in range(len(row["tokens"]))])
    assert results["eval_f1"] == pytest.approx(seqeval.f1_score(true, predicted))
    assert results["eval_accuracy"] == pytest.approx(seqeval.accuracy_score(true, predicted))
    assert results["eval_f1"] > 0.1
