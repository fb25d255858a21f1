"""An exported model is complete and loads with the trained weights."""

import math
import os
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from stand_ins import accelerator

from shared.checkpoints.progress import Progress
from shared.config.options import Options
from shared.errors import UserError
from shared.monitoring.hooks import Hook
from shared.run.export import Export
from shared.run.training_run import Ddp


def export(accelerator, config, progress, model, processor=None):
    run = SimpleNamespace(accelerator=accelerator, config=config, progress=progress, strategy=Ddp(), hooks=[Note()])
    Export().write(run, model, processor)


class Note(Hook):
    def saved(self, run, model, folder):
        (folder / "note").write_text(type(model).__name__)


class Model(torch.nn.Module):
    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.0, weight]))
        self.register_buffer("mask", torch.tensor(-math.inf))


FINISHED = Progress(step=8, results={"eval_accuracy": 0.5}, best_step=4, best_results={"eval_accuracy": 0.75})


class Processor:
    def save_pretrained(self, folder):
        (folder / "tokenizer").write_text("words")


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_an_export_is_complete_and_replaces_the_older_one_with_the_usual_permissions(tmp_path, umask):
    class Private(Processor):
        def save_pretrained(self, folder):
            super().save_pretrained(folder)
            (folder / "tokenizer").chmod(0o600)  # as safetensors does
            (folder / "more").mkdir(0o700)

    config = Options(output_dir=str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/old").write_text("old")
    (tmp_path / "model.partial-of_a_killed_writer").mkdir()
    before = os.umask(umask)
    try:
        export(accelerator(), config, FINISHED, Model(), Private())
    finally:
        os.umask(before)
    written = {path.name for path in (tmp_path / "model").iterdir()}
    assert written == {"model.safetensors", "tokenizer", "note", "more"}
    for path in (tmp_path / "model", *(tmp_path / "model").iterdir()):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    export(accelerator(), config, FINISHED, Model(), object())  # a processor that cannot save itself
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"model.safetensors", "note"}


def test_a_failed_export_keeps_the_older_model_and_leaves_no_incomplete_files(tmp_path):
    full = SimpleNamespace(save_pretrained=mock.Mock(side_effect=OSError(28, "No space left on device")))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/old").write_text("old")
    with pytest.raises(UserError, match=r"cannot write .*/model .*No space left on device.*: free space"):
        export(accelerator(), Options(output_dir=str(tmp_path)), FINISHED, Model(), full)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]


@pytest.mark.parametrize(
    ("weight", "loss", "best_loss", "said"),
    [
        (math.nan, 0.5, None, "the model of step 8 is not exported, because its parameter weight is not finite: lower"),
        (1.0, math.nan, None, "the model of step 8 is not exported, because its evaluation loss is nan: lower"),
        (1.0, 0.5, math.inf, "the model of step 4 is not exported, because its evaluation loss is inf: lower"),
        (1.0, math.nan, 0.5, None),  # the best one is finite
        (1.0, 0.5, None, None),
    ],
)
def test_a_model_that_is_not_finite_is_not_exported(tmp_path, weight, loss, best_loss, said):
    config, progress = Options(output_dir=str(tmp_path)), Progress(step=8, results={"eval_loss": loss})
    if best_loss is not None:
        config = Options(output_dir=str(tmp_path), load_best_model_at_end=True, metric_for_best_model="accuracy")
        progress.best_step, progress.best_results = 4, {"eval_loss": best_loss}
    with pytest.raises(UserError, match=f"^{said}") if said else nullcontext():
        export(accelerator(), config, progress, Model(weight), Processor())
    assert [path.name for path in tmp_path.iterdir()] == ([] if said else ["model"])
