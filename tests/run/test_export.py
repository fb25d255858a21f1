"""An exported model is complete and loads with the trained weights."""

import math
import os
import re
import shutil
import sys

import pytest
import runs
import torch
from stand_ins import accelerator

from shared.checkpoints.progress import Progress
from shared.config.options import Options
from shared.errors import UserError
from shared.run import export


class Model(torch.nn.Module):
    """Saves itself as a file."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.0, weight]))
        self.register_buffer("mask", torch.tensor(-math.inf))

    def save_pretrained(self, folder, state_dict=None):
        (folder / "weights").write_text("weights" if state_dict else "none")


class Processor:
    def save_pretrained(self, folder):
        (folder / "tokenizer").write_text("words")


@pytest.fixture
def finished_progress():
    return Progress(step=8, results={"eval_accuracy": 0.5}, best_step=4, best_results={"eval_accuracy": 0.75})


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_an_export_is_complete_and_replaces_the_older_one_with_the_usual_permissions(
    tmp_path, finished_progress, umask
):
    class Private(Processor):
        def save_pretrained(self, folder):
            super().save_pretrained(folder)
            (folder / "tokenizer").chmod(0o600)  # as safetensors does
            (folder / "more").mkdir(0o700)

    config = Options(output_dir=str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/old").write_text("old")
    before = os.umask(umask)
    try:
        export.export(accelerator(), config, finished_progress, Model(), Private())
    finally:
        os.umask(before)
    assert {path.name for path in (tmp_path / "model").iterdir()} == {"weights", "tokenizer", "README.md", "more"}
    for path in (tmp_path / "model", *(tmp_path / "model").iterdir()):
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_failed_export_keeps_the_older_model_and_leaves_no_incomplete_files(tmp_path, finished_progress):
    class Full(Processor):
        def save_pretrained(self, folder):
            raise OSError(28, "No space left on device")

    config = Options(output_dir=str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/old").write_text("old")
    with pytest.raises(UserError, match=r"cannot write .*/model .*No space left on device.*: free space"):
        export.export(accelerator(), config, finished_progress, Model(), Full())
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "old"]


@pytest.mark.parametrize(
    ("weight", "loss", "best_loss", "said"),
    [
        (math.nan, 0.5, None, "the model of step 8 is not exported, because its parameter weight is not finite: lower"),
        (math.inf, 0.5, None, "the model of step 8 is not exported, because its parameter weight is not finite: lower"),
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
    if said is None:
        export.export(accelerator(), config, progress, Model(weight), Processor())
        return
    with pytest.raises(UserError, match=f"^{said}"):
        export.export(accelerator(), config, progress, Model(weight), Processor())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", ["_orig_mod.{}", "{}.old"])
def test_an_export_that_would_not_load_with_all_trained_weights_is_refused_and_removed(
    tmp_path, finished_progress, wrong
):
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 9, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    model = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=1))  # some of its weights are tied
    config = Options(output_dir=str(tmp_path))
    export.export(accelerator(), config, finished_progress, model, Processor())
    shutil.rmtree(tmp_path / "model")

    (tmp_path / "checkpoints").mkdir()
    launched = accelerator()
    last = "bert.embeddings.LayerNorm.bias"
    renamed = {wrong.format(name) if name == last else name: value for name, value in model.state_dict().items()}
    launched.get_state_dict = lambda _: renamed
    said = rf"1 missing \({re.escape(last)}\), 1 unexpected .*checkpoints are kept"
    with pytest.raises(UserError, match=said):
        export.export(launched, config, finished_progress, model, Processor())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_the_model_card_has_the_results_of_the_model_and_the_command(monkeypatch, tmp_path, finished_progress):
    monkeypatch.setattr(sys, "argv", ["recipes/nlp.py", "--train_file", "my data.csv", "--seed", "3"])
    nlp = runs.load_recipe("nlp")
    config = nlp.Config(output_dir=str(tmp_path / "name"), train_file="my data.csv", seed=3)
    card = export.model_card(config, finished_progress)
    assert card.startswith("---\nlibrary_name: transformers\ntags: [accelerate-recipes]\n---\n\n# name\n")
    assert "on my data.csv: 8 steps of 32 samples, seed 3." in card
    assert "\n| accuracy | 0.5000 |\n" in card
    assert "    recipes/nlp.py --train_file 'my data.csv' --seed 3\n" in card  # can be pasted into a shell

    best = nlp.Config(
        model_name_or_path="owner/model", load_best_model_at_end=True, metric_for_best_model="accuracy", run_name="mine"
    )
    card = export.model_card(best, finished_progress)
    assert "\nbase_model: owner/model\n" in card
    assert "\n# mine\n" in card
    assert "on the embedded data: 4 steps" in card
    assert "| accuracy | 0.7500 |" in card
    assert "base_model" not in export.model_card(nlp.Config(model_name_or_path=str(tmp_path)), finished_progress)
