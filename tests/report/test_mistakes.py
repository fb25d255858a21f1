"""mistakes.json holds the right counts, the worst samples first, and is bounded; a failure never ends a run."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import confusion_matrix

from shared.report import mistakes
from shared.report.mistakes import LONGEST, MOST_CLASSES, MOST_CONFUSED, WORST, Mistakes, as_text


def text(sample):
    return {"text": f"text {sample}"}


def of(names, predictions, targets, losses=None, show=text):
    losses = np.arange(len(targets), dtype=float) if losses is None else losses
    return mistakes.mistakes(names, show, np.array(predictions), losses, np.array(targets))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60))
def test_counts_are_those_of_scikit_learn(pairs):
    predicted, true = np.array(pairs).T
    found = of("abcde", predicted.astype(float), true)
    expected = confusion_matrix(true, predicted, labels=range(5))
    assert found["counts"] == expected.tolist()
    counts = np.stack([expected.sum(1), expected.sum(0), expected.diagonal()], 1).tolist()
    assert found["classes"] == [[name, *each] for name, each in zip("abcde", counts, strict=True)]
    assert found["wrong"] == expected.sum() - expected.trace()


def test_the_worst_samples_come_first_and_right_ones_do_not_come():
    losses = np.array([9.0, 1.0, math.nan, 3.0, math.inf])
    found = of("ab", [0, 1, 1, 1, 1], [0, 0, 0, 0, 0], losses)
    assert [(sample["row"], sample["loss"]) for sample in found["worst"]] == [
        (3, "NaN"), (5, "Infinity"), (4, 3.0), (2, 1.0),
    ]  # fmt: skip
    assert found["worst"][2] == {"row": 4, "says": "b", "is": "a", "loss": 3.0, "text": "text 3"}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_many_classes_and_long_texts_are_limited_to_those_with_the_most_errors():
    rng = np.random.default_rng(0)
    true = rng.integers(0, 1000, 50_000)
    predicted = true.copy()
    predicted[true == 7] = 901
    predicted[(true == 40) & (np.arange(len(true)) % 2 == 0)] = 41
    predicted[:300] = rng.integers(0, 1000, 300)
    names = [f"class {i}" for i in range(1000)]
    found = of(names, predicted, true, show=lambda _: {"text": "long " * 1000})
    assert len(found["classes"]) == MOST_CLASSES
    assert found["num_classes"] == 1000
    assert {"class 7", "class 901", "class 40", "class 41"} <= set(found["confused"])
    assert len(found["confused"]) <= MOST_CONFUSED
    cell = found["counts"][found["confused"].index("class 7")][found["confused"].index("class 901")]
    assert cell == ((true == 7) & (predicted == 901)).sum()
    assert len(found["worst"]) == WORST
    assert len(found["worst"][0]["text"]) == LONGEST
    assert len(json.dumps(found)) < 50_000
    right = of(names, np.arange(50), np.arange(50))
    assert right["confused"] == right["counts"] == right["worst"] == []


def test_several_labels_of_a_sample_are_counted_label_by_label():
    found = of(["a", "b"], [[1, 0], [1, 1], [0, 0]], [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    assert found["classes"] == [["a", 2, 2, 2], ["b", 2, 1, 1]]
    assert [(sample["says"], sample["is"]) for sample in found["worst"]] == [("a", "a, b")]
    assert "confused" not in found


def test_a_regression_has_points_without_those_that_are_not_finite():
    found = of((), [1.0, math.nan, 3.0], [1.5, 2.0, 3.0], np.array([0.25, math.nan, 0.0]))
    assert found["points"] == [[1.5, 1.0], [3.0, 3.0]]
    assert [(sample["says"], sample["is"]) for sample in found["worst"]] == [("nan", "2"), ("1", "1.5")]
    assert len(of((), np.zeros(5000), np.ones(5000))["points"]) == mistakes.MOST_POINTS


@pytest.fixture
def run(tmp_path):
    config = SimpleNamespace(output_dir=str(tmp_path), load_best_model_at_end=False)
    accelerator, progress = SimpleNamespace(is_main_process=True), SimpleNamespace(best_step=None)
    return SimpleNamespace(config=config, accelerator=accelerator, progress=progress)


def evaluate(hook, step, predicted):
    hook.keep(np.array([predicted]), np.array([1.0]), np.array([0]))
    hook.logged(step, {"eval_loss": 1.0})
    file = Path(hook.run.config.output_dir) / "mistakes.json"
    return json.loads(file.read_text())["step"] if file.exists() else None


@pytest.mark.parametrize(("best", "steps"), [(False, [5, 10]), (True, [5, 5])])
def test_the_file_is_of_the_model_that_is_exported(run, best, steps):
    hook = Mistakes("ab", text)
    hook.given(run, None)
    run.config.load_best_model_at_end, run.progress.best_step = best, 5
    assert [evaluate(hook, 5, 0), evaluate(hook, 10, 1)] == steps


def test_a_failure_is_a_warning_and_other_processes_keep_nothing(run, tmp_path, capsys):
    hook = Mistakes("ab", lambda sample: {}[sample])
    hook.given(run, None)
    assert evaluate(hook, 5, 1) is None
    assert "warning: mistakes.json was not written: KeyError: 0" in capsys.readouterr().err
    run.accelerator.is_main_process = False
    assert evaluate(hook, 5, 1) is None
    assert not capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_pair_of_texts_has_a_bar_between_them():
    words = {0: "[CLS]", 1: "[SEP]", 2: "[UNK]", 3: "a", 4: "b"}
    tokenizer = SimpleNamespace(
        all_special_ids=[0, 1, 2], unk_token_id=2, decode=lambda ids: " ".join(words[i] for i in ids)
    )
    assert as_text(tokenizer, np.array([0, 3, 2, 1, 4, 4, 1])) == {"text": "a [UNK] | b b"}
