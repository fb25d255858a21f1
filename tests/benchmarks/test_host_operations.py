"""The recipes call hardly more operators per micro-batch than a bare loop on the same batches."""

import json
import sys

import pytest
import runs
import torch

sys.path.insert(0, str(runs.ROOT))

from benchmarks import host_operations
from benchmarks.host_operations import Case
from shared.encoders import text_models
from shared.run.training_run import TrainingRun

STEPS = 2
MOST = 1.1  # times the operators of the bare loop
MOST_PYTHON = 1.4  # times its Python calls; the recipe also reads its batches, and makes few of its calls itself
FLAGS = {"nlp": runs.TINY, "images": runs.TINY_IMAGES}
AUGMENTED = ("--horizontal_flip", "--label_smoothing", "0.1", "--mixup", "0.2", "--cutmix", "1")


@pytest.fixture
def count(texts, tmp_path, one_cpu_process_without_a_picture):
    """Count both loops of a comparison: the counts of the recipe, and those of the bare loop."""

    def call(name, precision, *flags):
        words = [*FLAGS[name], *(texts if name == "nlp" else []), "--logging_steps", STEPS, *flags]
        case = Case(name, precision, tuple(map(str, words)))
        return [host_operations.measure(case, ours, tmp_path, STEPS, count=True) for ours in (True, False)]

    return call


def check(ours, bare):
    for figure, value in bare.items():
        most = MOST_PYTHON if figure == "python_per_micro_batch" else MOST
        assert 0 < ours[figure] <= most * value, figure


DOCS = pytest.mark.docs


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("images", "no"),
        pytest.param("nlp", "no", marks=DOCS),
        pytest.param("nlp", "bf16", marks=DOCS),
        pytest.param("images", "bf16", marks=DOCS),
    ],
)
def test_a_recipe_calls_at_most_a_tenth_more_operators_than_a_bare_loop(count, name, precision, monkeypatch):
    # On a CPU in bf16, attention takes several operators, because they are faster than the fused one; on a GPU one.
    monkeypatch.setattr(text_models, "attend_by_products", text_models.mask_on_device)
    ours, bare = count(name, precision)
    check(ours, bare)
    assert bare["all_per_micro_batch"] > bare["operators_per_micro_batch"] > bare["operators_per_step"]


@pytest.mark.docs
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_mixed_images_and_smoothed_labels_cost_no_more_operators_than_in_a_bare_loop(count, precision):
    ours, bare = count("images", precision, *AUGMENTED)
    check(ours, bare)


@pytest.mark.docs  # docs/faster_runs.md has the command that counts
def test_an_operator_more_in_a_micro_batch_or_a_step_is_counted(count, monkeypatch):
    before, bare = count("images", "no")
    add, end_step = TrainingRun.count, TrainingRun.end_step
    monkeypatch.setattr(TrainingRun, "count", lambda *arguments: (torch.ones(2), add(*arguments)))
    monkeypatch.setattr(TrainingRun, "end_step", lambda *arguments: (torch.ones(2), end_step(*arguments)))
    after, bare_again = count("images", "no")
    assert bare_again == bare
    lambda_and_method, ones = 2, ["aten::ones", "aten::empty", "aten::fill_"]
    for figure in before:
        more = {"operators": 1, "all": len(ones), "python": lambda_and_method}[figure.split("_")[0]]
        assert after[figure] == before[figure] + more, figure


@pytest.mark.docs
def test_the_benchmark_writes_its_ratios(tmp_path, monkeypatch, one_cpu_process_without_a_picture):
    words = ["--rounds", "1", "--steps", "2", "--works", "images", "--precisions", "no", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/host_operations.py", *words, *runs.TINY_IMAGES])
    host_operations.main()
    report = json.loads((tmp_path / "host_operations.json").read_text())
    assert [row["contestant"] for row in report["rows"]] == ["images, no: ours", "images, no: bare"]
    assert report["comparisons"]["images, no: operators_per_micro_batch, ours / bare"]["median"] > 0
    assert min(row["cpu_ms_per_step"] for row in report["rows"]) > 0
