"""What the launch settles once for a run, what its folder ends with, and which of its models is the best."""

import dataclasses
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest
import runs
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.checkpoints import resuming
from shared.checkpoints.progress import BestBy, Progress
from shared.config import options
from shared.config.options import Options
from shared.errors import UserError
from shared.run import export, run_folder


def accelerator(processes=1, precision="no"):
    """What the functions here ask of an Accelerator."""
    return SimpleNamespace(
        num_processes=processes,
        is_main_process=True,
        mixed_precision=precision,
        print=print,
        get_state_dict=lambda model: model.state_dict(),
        unwrap_model=lambda model: model,
    )


# The global batch and the precision


def accumulated(steps, rows=4, **more):
    return Options(
        **{"global_batch_size": None} | more, per_device_train_batch_size=rows, gradient_accumulation_steps=steps
    )


@given(rows=st.integers(1, 64), processes=st.integers(1, 16), steps=st.integers(1, 16), later=st.integers(1, 16))
def test_the_global_batch_is_derived_at_the_first_launch_and_kept_on_any_number_of_processes(
    rows, processes, steps, later
):
    flags = accumulated(steps, rows)
    first = run_folder.resolve(flags, accelerator(processes), None)
    assert first.global_batch_size == rows * processes * steps
    assert first.gradient_accumulation_steps is None
    stored = options.plain(first)
    resumed = run_folder.resolve(flags, accelerator(later), stored)
    assert resumed == first
    run_folder.refuse_another_run(stored, resumed, Path("out"))  # does not


def test_a_resumed_run_says_that_its_global_batch_is_not_that_of_the_flags(capsys):
    stored = options.plain(run_folder.resolve(accumulated(2), accelerator(2), None))
    run_folder.resolve(accumulated(2), accelerator(2), stored)
    assert capsys.readouterr().out == ""
    run_folder.resolve(accumulated(2), accelerator(1), stored)
    assert capsys.readouterr().out == (
        "the run keeps the global batch of its first launch, 16, and not 4 per device x 1 process x 2 accumulation "
        "steps = 8\n"
    )


def test_a_global_batch_that_does_not_fit_the_accumulation_is_refused_with_the_equation():
    with pytest.raises(UserError, match=r"--global_batch_size 12 is not 4 per device x 2 processes x 2 .* = 16: leave"):
        run_folder.resolve(accumulated(2, global_batch_size=12), accelerator(2), None)
    assert run_folder.resolve(accumulated(2, global_batch_size=16), accelerator(2), None).global_batch_size == 16


def test_another_global_batch_is_no_continuation_of_a_run():
    stored = options.plain(run_folder.resolve(accumulated(2), accelerator(2), None))
    config = run_folder.resolve(accumulated(2, global_batch_size=8), accelerator(1), stored)
    with pytest.raises(UserError, match=r"out holds a run .*--global_batch_size was 16, is 8.*another --output_dir"):
        run_folder.refuse_another_run(stored, config, Path("out"))


def test_the_precision_of_the_launcher_becomes_part_of_the_run():
    config = run_folder.resolve(Options(), accelerator(precision="bf16"), None)
    assert config.mixed_precision == "bf16"
    with pytest.raises(UserError, match="--mixed_precision was bf16, is no"):
        run_folder.refuse_another_run(
            options.plain(config), run_folder.resolve(Options(), accelerator(), None), Path("out")
        )


def test_the_default_learning_rate_is_settled_and_an_older_run_keeps_its_own(capsys):
    made = runs.load_recipe("nlp").Config
    new, pretrained = made(), made(model_name_or_path="a/model")
    assert run_folder.resolve(new, accelerator(), None).learning_rate == 1e-3
    settled = run_folder.resolve(pretrained, accelerator(), None)
    assert settled.learning_rate == 5e-5
    assert run_folder.resolve(pretrained, accelerator(), options.plain(settled)).learning_rate == 5e-5
    assert capsys.readouterr().out == ""
    older = options.plain(settled) | {"learning_rate": 1e-3}
    assert run_folder.resolve(pretrained, accelerator(), older).learning_rate == 1e-3
    assert capsys.readouterr().out == "the run keeps --learning_rate 0.001, which was the default when it began\n"
    for explicit, stored in ((2e-4, older), (None, older | {"learning_rate": 2e-4})):
        config = run_folder.resolve(dataclasses.replace(pretrained, learning_rate=explicit), accelerator(), stored)
        with pytest.raises(UserError, match="--learning_rate was"):
            run_folder.refuse_another_run(stored, config, Path("out"))


# The finished run


def finished_run(folder, *lines):
    """A folder as a run leaves it, with these lines in metrics.jsonl."""
    (folder / "model").mkdir()
    (folder / "model/config.json").write_text("{}")
    config = Options(output_dir=str(folder), lr_scheduler_type="constant")
    options.save(config, folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return config


EVALUATED = {"step": 4, "eval_loss": 0.5, "eval_accuracy": "NaN"}
LAST = {"step": 8, "train_runtime": 1.0}


def test_a_finished_run_gives_its_last_evaluation(tmp_path):
    config = finished_run(tmp_path, {"step": 2, "eval_loss": 1.0}, EVALUATED, {"step": 8, "loss": 0.1}, LAST)
    result = run_folder.finished(accelerator(), config, Progress(), tuple)
    assert result["eval_loss"] == 0.5
    assert math.isnan(result["eval_accuracy"])
    assert len(result) == 2


@pytest.mark.parametrize("what", ["no last line", "no model", "no record", "longer"])
def test_a_run_that_has_more_to_do_is_not_finished(tmp_path, what):
    config = finished_run(tmp_path, EVALUATED, *([] if what == "no last line" else [LAST]))
    if what == "no model":
        (tmp_path / "model/config.json").unlink()
    if what == "no record":
        (tmp_path / "metrics.jsonl").unlink()
    if what == "longer":
        config = Options(output_dir=str(tmp_path), lr_scheduler_type="constant", num_train_epochs=4)
    assert run_folder.finished(accelerator(), config, Progress(), tuple) is None


# The exported model


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


def test_an_export_that_fails_leaves_the_older_model_and_nothing_half_written(tmp_path, finished_progress):
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
def test_an_export_that_would_not_load_as_it_was_trained_leaves_no_model(tmp_path, finished_progress, wrong):
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


def test_the_model_card_has_the_numbers_of_the_model_and_the_command(monkeypatch, tmp_path, finished_progress):
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


class Hub:
    """Stands in for the Hub's client: keeps what it is asked for, or fails."""

    asked: ClassVar[list] = []
    failure: Exception | None = None

    def create_repo(self, name, exist_ok):
        assert exist_ok
        if self.failure:
            raise self.failure
        self.asked.append(name)
        return SimpleNamespace(repo_id=f"me/{name}")

    def upload_folder(self, folder_path, repo_id, commit_message):
        self.asked.append((sorted(path.name for path in folder_path.iterdir()), repo_id))
        return f"https://hub/{repo_id}"


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(Hub, "asked", [])
    monkeypatch.setattr(Hub, "failure", None)
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


@pytest.mark.parametrize(("given", "name"), [(None, "run"), ("mine", "mine")])
def test_the_model_is_uploaded_under_its_name(hub, tmp_path, capsys, finished_progress, given, name):
    (tmp_path / "run").mkdir()
    config = Options(output_dir=str(tmp_path / "run"), push_to_hub=True, hub_model_id=given)
    export.export(accelerator(), config, finished_progress, Model(), Processor())
    assert hub.asked == [name, (["README.md", "tokenizer", "weights"], f"me/{name}")]
    assert f"uploaded to https://hub/me/{name}" in capsys.readouterr().out


def test_without_the_flag_nothing_is_uploaded(hub, tmp_path, finished_progress):
    export.export(accelerator(), Options(output_dir=str(tmp_path)), finished_progress, Model(), Processor())
    assert hub.asked == []


def test_an_upload_that_fails_keeps_the_model_and_says_how_to_try_again(hub, monkeypatch, tmp_path, finished_progress):
    monkeypatch.setattr(hub, "failure", ConnectionError("401 Client Error.\n\nInvalid token"))
    config = Options(output_dir=str(tmp_path), push_to_hub=True, hub_model_id="mine")
    with pytest.raises(UserError) as caught:
        export.export(accelerator(), config, finished_progress, Model(), Processor())
    assert str(caught.value) == (
        "--push_to_hub: mine could not be uploaded (401 Client Error. Invalid token), and the model is in "
        f"{tmp_path / 'model'}: start again to try it once more, or without the flag"
    )
    assert (tmp_path / "model/weights").read_text() == "weights"


# Progress

accuracy = BestBy("eval_accuracy", greater_is_better=True)
loss = BestBy("eval_loss", greater_is_better=False)


def recorded(values, best_by):
    """A progress that took in one evaluation after each step."""
    progress = Progress()
    for progress.step, value in enumerate(values, start=1):
        progress.record({best_by.name: value}, best_by)
    return progress


@given(values=st.lists(st.floats(allow_infinity=True), min_size=1), greater=st.booleans())
def test_the_best_step_is_the_first_with_the_best_number(values, greater):
    progress = recorded(values, BestBy("eval_x", greater))
    numbers = [value for value in values if not math.isnan(value)]
    best = (max if greater else min)(numbers) if numbers else values[0]
    assert progress.best_step == 1 + (values.index(best) if numbers else 0)
    assert progress.best_results["eval_x"] is values[progress.best_step - 1]
    assert progress.evaluations_since_best == len(values) - progress.best_step
    assert progress.results == {"eval_x": values[-1]} or math.isnan(values[-1])


@pytest.mark.parametrize(
    ("values", "patience", "out"),
    [
        ([0.5, 0.5, 0.5], 2, True),
        ([0.5, 0.4, 0.6], 1, False),
        ([0.5, 0.4], 2, False),
        ([0.5, 0.4], None, False),
        ([math.nan] * 3, 2, True),  # a run that has diverged does not come back
        ([0.5, math.nan, math.nan], 2, True),
        ([math.nan, 0.1], 1, False),
    ],
)
def test_patience_counts_evaluations_without_a_better_one(values, patience, out):
    assert recorded(values, accuracy).out_of_patience(patience) is out


def test_a_resumed_run_with_another_metric_begins_its_best_anew():
    progress = recorded([0.5], accuracy)
    progress.step = 2
    progress.record({"eval_roc_auc": 0.1}, BestBy("eval_roc_auc", greater_is_better=True))
    assert (progress.best_step, progress.best_results) == (2, {"eval_roc_auc": 0.1})


@pytest.mark.parametrize(("values", "patience"), [([0.5, 0.75, 0.5, 0.25], 2), ([0.5, 0.75, 0.5], 2), ([0.5], None)])
def test_a_run_that_stops_early_says_when_and_which_evaluation_was_best(values, patience, capsys):
    config = Options(early_stopping_patience=patience, metric_for_best_model="accuracy" if patience else None)
    resuming.load_best(accelerator(), config, recorded(values, accuracy))
    said = (
        "early stopping after step 4: 2 evaluations in a row were no better than that of step 2 (eval_accuracy 0.75); "
        "model/ has the last one\n"
    )
    assert capsys.readouterr().out == (said if len(values) == 4 else "")


def test_less_loss_is_better():
    assert recorded([0.5, 0.3, 0.4], loss).best_step == 2


def test_a_progress_comes_back_from_a_checkpoint_with_the_time_it_took():
    progress = recorded([0.5, 0.4], accuracy)
    progress.run_id, progress.monitor, progress.seconds = "abc", {"digest": "00"}, 5.0
    state = json.loads(json.dumps(progress.state() | {"config": {}, "world_size": 2}))
    again = Progress.from_state(state)
    assert again.seconds >= 5.0
    for name in ("step", "results", "best_step", "best_results", "evaluations_since_best", "run_id", "monitor"):
        assert getattr(again, name) == getattr(progress, name)
