"""The recipe of docs/your_own_recipe.md is short and gives the same run on 1 and 2 processes, interrupted or not."""

import pytest
import runs
import torch

RECIPE = runs.ROOT / "docs/examples/diabetes.py"
MOST_LINES = 80  # of code


def test_the_recipe_is_short():
    source = RECIPE.read_text()
    assert len([line for line in source.splitlines() if line.strip()]) < MOST_LINES


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Runs on one process and on two, and one that began on two processes and was resumed on one."""
    folder = tmp_path_factory.mktemp("diabetes")
    flags = ["--lr_scheduler_type", "constant", "--warmup_steps", "2", "--checkpointing_steps", "20"]
    half, whole = [*flags, "--max_train_steps", "20"], [*flags, "--max_train_steps", "40"]
    outputs = {"two": runs.run_many(2, {"whole": whole, "half": half}, folder, RECIPE)}
    checkpoint = outputs["two"]["half"] / "checkpoints/step_00000020"
    resumed = [*whole, "--resume_from_checkpoint", checkpoint]
    one = runs.run_many(1, {"whole": whole, "resumed": resumed}, folder, RECIPE)
    return {"one": one["whole"], "two": outputs["two"]["whole"], "resumed": one["resumed"]}


@pytest.mark.parametrize("other", ["two", "resumed"])
def test_a_run_on_two_processes_and_a_resumed_run_have_the_same_weights(finished, other):
    assert runs.training_lines(finished[other])[-1]["step"] == 40
    assert torch.allclose(runs.weights(finished["one"]), runs.weights(finished[other]), rtol=0, atol=1e-6)


def test_the_model_learns(finished):
    scores = [line["eval_r2"] for line in runs.metrics(finished["one"]) if "eval_r2" in line]
    assert scores[-1] > 0.3
