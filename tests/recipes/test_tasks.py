"""The tasks of the NLP recipe train, and their scores equal those of scikit-learn and scipy.

The scores are computed again with the exported model, which transformers loads and applies to one text at a time,
without padding.
"""

import csv
import json

import numpy as np
import pytest
import runs
import torch
from one_text_at_a_time import logits_of
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, mean_squared_error, precision_score, recall_score, roc_auc_score
from transformers import AutoConfig

FLAGS = [*runs.TINY, "--max_train_steps", "24", "--eval_steps", "24", "--learning_rate", "0.005"]


def several_labels(text):
    """A row with several labels: each of these words in the text is one."""
    return {"text": text, "label": [word for word in ("the", "return", "of", "test") if word in text.lower()] or ["no"]}


@pytest.fixture
def train(texts, tmp_path):
    """A function that trains on rows made from the texts; it returns the validation rows and the folder of the run."""

    def call(row_of, *flags):
        files = []
        for flag, file in (texts[:2], texts[2:]):
            with file.open(newline="") as stream:
                rows = [row_of(row["text"]) for row in csv.DictReader(stream)]
            written = tmp_path / f"{file.stem}.jsonl"
            written.write_text("".join(json.dumps(row) + "\n" for row in rows))
            files += [flag, str(written)]
        runs.train("nlp", tmp_path / "run", *FLAGS, *files, *flags)
        return rows, tmp_path / "run"

    return call


def scores_of(output):
    """The scores of the evaluation in metrics.jsonl."""
    found = runs.evaluation(output).items()
    return {name.removeprefix("eval_"): value for name, value in found if name.startswith("eval_")}


def test_scores_of_several_labels_per_text_equal_those_of_scikit_learn(train):
    several = ["micro_f1", "macro_f1", "accuracy", "roc_auc"]
    rows, output = train(several_labels, "--metric_name", *several)
    logits = logits_of(output / "model", [row["text"] for row in rows])
    names = AutoConfig.from_pretrained(output / "model").id2label.values()
    true = np.array([[name in row["label"] for name in names] for row in rows], int)
    predicted = (logits > 0).int().numpy()
    assert 0 < predicted.mean() < 1
    roc_auc = [roc_auc_score(t, s) for t, s in zip(true.T, logits.T.numpy(), strict=True) if np.ptp(t)]
    expected = [f1_score(true, predicted, average="micro"), f1_score(true, predicted, average="macro", zero_division=0)]
    expected += [accuracy_score(true, predicted), np.mean(roc_auc)]
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(true, dtype=torch.float32))
    wanted = dict(zip(["loss", *several], [loss.item(), *expected], strict=True))
    assert scores_of(output) == pytest.approx(wanted, abs=1e-5)


def two_classes(text):
    """A row of two classes: whether the text contains "return"."""
    return {"text": text, "label": "yes" if "return" in text.lower() else "no"}


def test_the_exported_model_gives_every_reported_score_in_a_pipeline(train):
    """Scores of one class and of probabilities, as reported in metrics.jsonl and in the model card."""
    from transformers import pipeline

    names = ["f1_of_class", "accuracy", "roc_auc", "precision_of_class", "recall_of_class"]
    rows, output = train(two_classes, "--metric_name", *names, "--class_weights", "balanced")
    classify = pipeline("text-classification", model=str(output / "model"), top_k=None, max_length=48, truncation=True)
    yes = [{one["label"]: one["score"] for one in answer}["yes"] for answer in classify([row["text"] for row in rows])]
    true, probability = np.array([row["label"] == "yes" for row in rows]), np.array(yes)
    predicted = probability > 0.5
    assert 0 < predicted.mean() < 1
    assert (predicted != true).any()
    expected = {
        "f1_of_class": f1_score(true, predicted),
        "accuracy": accuracy_score(true, predicted),
        "roc_auc": roc_auc_score(true, probability),
        "precision_of_class": precision_score(true, predicted),
        "recall_of_class": recall_score(true, predicted),
    }
    scores = scores_of(output)
    assert [*scores] == ["loss", *names]
    card = (output / "model/README.md").read_text()
    for name, value in expected.items():
        assert scores[name] == pytest.approx(float(value), abs=1e-6), name
        assert f"| {name} | {value:.4f} |" in card


def a_large_number(text):
    """A row with a pair of texts and a number. The numbers are far from 0 and from each other."""
    first, second = text[: len(text) // 3], text[len(text) // 4 :]
    return {"text": first, "text_pair": second, "label": 5e8 + 4e6 * (len(text) - 60) + 1e7 * text.count("t")}


def test_large_numbers_for_pairs_of_texts_are_learned_and_the_exported_model_answers_in_their_units(train, tmp_path):
    from transformers import pipeline

    columns = "text", "text_pair"
    rows, output = train(a_large_number, "--text_column_names", *columns)
    logits = logits_of(output / "model", *([row[name] for row in rows] for name in columns))
    config = AutoConfig.from_pretrained(output / "model")
    assert (config.problem_type, config.num_labels) == ("regression", 1)
    predicted, true = logits[:, 0].double().numpy(), np.array([row["label"] for row in rows])
    scores = scores_of(output)
    for name, correlation in (("pearson", pearsonr), ("spearman", spearmanr)):
        assert scores[name] == pytest.approx(correlation(predicted, true).statistic, abs=1e-4)
    for name in ("loss", "mean_squared_error"):
        assert scores[name] == pytest.approx(mean_squared_error(true, predicted), rel=1e-4)
    assert abs(predicted.mean() - true.mean()) < true.std()
    *_, last = runs.training_lines(output)
    assert last["loss"] < 0.9  # the scaled numbers have a variance of 1
    answer = pipeline("text-classification", model=str(output / "model"))({name: rows[0][name] for name in columns})
    assert answer["score"] == pytest.approx(predicted[0], rel=1e-6)
    card = (output / "model/README.md").read_text()
    assert "It answers in units of `label`. It was trained on (value - " in card

    frozen = ["--learning_rate", "1e-30", "--max_train_steps", "1", "--eval_steps", "1"]
    (tmp_path / "run").rename(tmp_path / "first")  # a run that starts from this model has its scores
    again = ["--text_column_names", *columns, "--model_name_or_path", str(tmp_path / "first/model")]
    _, output = train(a_large_number, *again, *frozen)
    assert scores_of(output) == {name: pytest.approx(value, rel=1e-3) for name, value in scores.items()}
