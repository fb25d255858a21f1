"""What is fixed at the first launch of a run and refused later, whether a run is finished, and its best model."""

import dataclasses
import json
import math
from pathlib import Path

import datasets
import pytest
import runs
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stand_ins import accelerator

from shared import disk
from shared.checkpoints.progress import BestBy, Progress
from shared.config import options
from shared.config.options import Options
from shared.errors import UserError
from shared.options.data_options import ExtraOptions
from shared.processes import starting
from shared.run import resume
from shared.run.resume import open_run, refuse_changed_data


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from ()


ROWS = datasets.Dataset.from_dict({"input_ids": [[1, 2]] * 9})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Stream(), "load_data returned a Stream without __len__, lengths, digest: "),
        (ROWS.to_iterable_dataset(), "load_data returned a IterableDataset without __len__, lengths, digest: "),
        ((i for i in range(3)), "load_data returned a generator without __len__, __getitem__, lengths, digest: "),
        (ROWS, "load_data returned a Dataset without lengths, digest: "),
    ],
)
def test_data_without_an_index_or_the_required_attributes_are_refused(data, expected):
    assert runs.refusal(refuse_changed_data, accelerator(), Progress(), data).startswith(expected)


# The global batch and the precision


def accumulated(steps, rows=4, **more):
    return ExtraOptions(
        **{"global_batch_size": None} | more, per_device_train_batch_size=rows, gradient_accumulation_steps=steps
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 64), processes=st.integers(1, 16), steps=st.integers(1, 16), later=st.integers(1, 16))
def test_the_global_batch_is_derived_at_the_first_launch_and_kept_on_any_number_of_processes(
    capsys, rows, processes, steps, later
):
    flags = accumulated(steps, rows)
    first = flags.settled(accelerator(processes), None)
    assert first.global_batch_size == rows * processes * steps
    assert first.gradient_accumulation_steps is None
    stored = options.plain(first)
    resumed = flags.settled(accelerator(later), stored)
    assert resumed == first
    resume.refuse_another_run(stored, resumed, Path("out"))  # raises no error
    assert ("the run keeps the global batch of its first launch" in capsys.readouterr().out) == (later != processes)


def test_a_global_batch_that_does_not_fit_the_accumulation_is_refused_with_the_equation():
    with pytest.raises(UserError, match=r"--global_batch_size 12 is not 4 per device x 2 processes x 2 .* = 16: leave"):
        accumulated(2, global_batch_size=12).settled(accelerator(2), None)
    assert accumulated(2, global_batch_size=16).settled(accelerator(2), None).global_batch_size == 16


def test_the_precision_of_the_launcher_becomes_part_of_the_run():
    config = Options().settled(accelerator(precision="bf16"), None)
    assert config.mixed_precision == "bf16"
    with pytest.raises(UserError, match="--mixed_precision was bf16, is no"):
        resume.refuse_another_run(options.plain(config), Options().settled(accelerator(), None), Path("out"))


def test_the_default_learning_rate_is_resolved(capsys):
    made = runs.load_recipe("nlp").Config
    new, pretrained = made(), made(model_name_or_path="a/model")
    assert new.settled(accelerator(), None).learning_rate == 1e-3
    settled = pretrained.settled(accelerator(), None)
    assert settled.learning_rate == 5e-5
    assert pretrained.settled(accelerator(), options.plain(settled)).learning_rate == 5e-5
    assert capsys.readouterr().out == ""
    for explicit, before in ((2e-4, 5e-5), (None, 2e-4)):
        stored = options.plain(settled) | {"learning_rate": before}
        config = dataclasses.replace(pretrained, learning_rate=explicit).settled(accelerator(), stored)
        assert "--learning_rate was" in runs.refusal(resume.refuse_another_run, stored, config, Path("out"))


@pytest.mark.parametrize(("recipe", "usual"), [("nlp", 1024), ("mlm", 2048)])
def test_the_budget_of_tokens_is_that_of_the_device_on_which_the_run_began(recipe, usual):
    flags = runs.load_recipe(recipe).Config()
    cpu, gpu = accelerator(), accelerator(device="cuda")
    for first, later, tokens in ((cpu, gpu, usual), (gpu, cpu, 16_384)):
        config = flags.settled(first, None)
        assert config.max_tokens == tokens
        assert flags.settled(later, options.plain(config)) == config
    assert dataclasses.replace(flags, max_tokens_per_micro_batch=500).settled(gpu, None).max_tokens == 500
    assert Options().settled(gpu, None).max_tokens is None


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
    disk.replace_file(tmp_path / "config.yaml", "a: 1\n")
    (tmp_path / "config.yaml.partial-123").write_text("a: ")
    (tmp_path / "model.partial-abc").mkdir()
    (tmp_path / "model.partial-abc/weights").write_text("half")
    disk.remove_unfinished(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


# The finished run


def finished_run(folder, *lines):
    """Write the files of a finished run, with these lines in metrics.jsonl; return its config."""
    (folder / "model").mkdir()
    config = Options(output_dir=str(folder), lr_scheduler_type="constant", mixed_precision="no")
    options.save(config, folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return config


def opened(config):
    """The result of `open_run`; the folder is unlocked again."""
    with starting.freed_after():
        return open_run(accelerator(), config)


EVALUATED = {"step": 4, "eval_loss": 0.5, "eval_accuracy": "NaN"}
LAST = {"step": 8, "train_runtime": 1.0}


def test_a_finished_run_returns_its_last_evaluation(tmp_path):
    config = finished_run(tmp_path, {"step": 2, "eval_loss": 1.0}, EVALUATED, {"step": 8, "loss": 0.1}, LAST)
    _, progress, _, finished = opened(config)
    assert finished
    assert progress.results["eval_loss"] == 0.5
    assert math.isnan(progress.results["eval_accuracy"])
    assert len(progress.results) == 2
    (tmp_path / "metrics.jsonl").write_text(json.dumps(LAST))  # a recipe that evaluates nothing
    _, progress, _, finished = opened(config)
    assert (finished, progress.results) == (True, {})


@pytest.mark.parametrize("what", ["no last line", "no model", "no record", "longer"])
def test_a_run_that_has_more_to_do_is_not_finished(tmp_path, what):
    config = finished_run(tmp_path, EVALUATED, *([] if what == "no last line" else [LAST]))
    if what == "no model":
        (tmp_path / "model").rmdir()
    if what == "no record":
        (tmp_path / "metrics.jsonl").unlink()
    if what == "longer":
        config = dataclasses.replace(config, num_train_epochs=4)
    assert not opened(config)[3]


# Progress

accuracy = BestBy("eval_accuracy", greater_is_better=True)


def recorded(values, best_by):
    """A progress with one recorded evaluation after each step."""
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
        ([math.nan] * 3, 2, True),  # a diverged run does not recover
        ([0.5, math.nan, math.nan], 2, True),
        ([math.nan, 0.1], 1, False),
    ],
)
def test_patience_counts_evaluations_without_an_improvement(values, patience, out):
    assert recorded(values, accuracy).out_of_patience(patience) is out


def test_a_run_that_resumes_with_a_different_metric_forgets_its_best_step():
    progress = recorded([0.5], accuracy)
    progress.step = 2
    progress.record({"eval_roc_auc": 0.1}, BestBy("eval_roc_auc", greater_is_better=True))
    assert (progress.best_step, progress.best_results) == (2, {"eval_roc_auc": 0.1})
