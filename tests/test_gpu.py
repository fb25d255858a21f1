"""What only a GPU can show; `make gpu` runs it. Not measured so far: no GPU was at hand when it was written."""

import importlib.util
import sys

import numpy as np
import pytest
import runs
import torch
from accelerate.state import AcceleratorState, PartialState

from shared import evaluation, options

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Accuracy:
    """Stands in for the evaluate modules, which a GPU machine may lack."""

    names = ("accuracy",)
    main_name = "accuracy"

    def compute(self, predictions, references):
        return {"accuracy": float(np.mean(predictions == references))}


@pytest.fixture
def train(texts, tmp_path, monkeypatch):
    """Call the recipe's main in this process, on the GPU; the training lines it leaves."""
    spec = importlib.util.spec_from_file_location("nlp", runs.ROOT / "recipes/nlp.py")
    recipe = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "nlp", recipe)
    spec.loader.exec_module(recipe)
    monkeypatch.setattr(evaluation, "resolve", lambda *_: Accuracy())

    def call(name, *flags):
        AcceleratorState._reset_state(reset_partial_state=True)
        output = tmp_path / name
        flags = [*map(str, texts), *runs.TINY, "--max_train_steps", "40", "--output_dir", str(output), *flags]
        recipe.main(options.parse(recipe.Config, flags))
        return output

    yield call
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_mixed_precision_matches_full_precision_within_noise(train, precision):
    full, mixed = train("full", "--mixed_precision", "no"), train("mixed", "--mixed_precision", precision)
    losses = [[line["loss"] for line in runs.training_lines(output)] for output in (full, mixed)]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert runs.training_lines(mixed)[-1]["samples"] == runs.training_lines(full)[-1]["samples"]
    weights = runs.weights(mixed)
    assert torch.isfinite(weights).all()


def test_fp16_keeps_its_loss_scale_in_the_checkpoint(train):
    output = train("scaled", "--mixed_precision", "fp16", "--checkpointing_steps", "20")
    assert (output / "checkpoints/step_00000020/scaler.pt").is_file()


def test_batches_reach_the_gpu_from_pinned_memory_in_workers(train):
    in_process = train("none", "--dataloader_num_workers", "0")
    in_workers = train("two", "--dataloader_num_workers", "2")
    losses = [[line["loss"] for line in runs.training_lines(output)] for output in (in_process, in_workers)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_fsdp_yaml_trains_evaluates_and_saves(texts, tmp_path):
    pytest.importorskip("evaluate")
    command = runs.accelerate_launch("fsdp", "recipes/nlp.py", *texts, *runs.TINY, flags=["--num_processes", "1"])
    runs.succeed([*command, "--output_dir", tmp_path / "fsdp"])
    assert torch.isfinite(runs.weights(tmp_path / "fsdp")).all()
