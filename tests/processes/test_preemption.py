"""A run that a signal ends at any point has, once resumed, the same weights and record as an uninterrupted run."""

import json
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
import runs

from shared.checkpoints import resuming
from shared.checkpoints.saving import Saver
from shared.errors import Preempted
from shared.optimization import gradients
from shared.processes import signals
from shared.processes.signals import Exchange, all_saved, heard, must_end
from shared.run import export
from shared.run.training_run import TrainingRun

STEPS = 16
FLAGS = [
    *(*runs.TINY, "--max_train_steps", STEPS, "--eval_steps", 8, "--logging_steps", 1),
    *("--checkpointing_steps", 8, "--save_total_limit", "None"),
]


@pytest.fixture(autouse=True)
def nothing_heard(monkeypatch):
    for name, value in {"signal": 0, "cut_short": False, "something_to_save": False, "output_dir": None}.items():
        monkeypatch.setattr(heard, name, value)


def save_and_end(accelerator, folder, step, finish=lambda: None):
    """What a run does after `step` once a signal has come; `finish` completes its checkpoint, and closes its hooks."""
    saver = SimpleNamespace(poll=lambda: None, finish=finish)
    config, progress = SimpleNamespace(output_dir=str(folder)), SimpleNamespace(step=step)
    run = SimpleNamespace(accelerator=accelerator, config=config, progress=progress, saver=saver)
    run._signals, run._save, run._close = Exchange(accelerator), lambda: None, finish
    TrainingRun.save_if_due(run)


# Two processes


def together(accelerator, folder):
    """What each of two processes observes when only rank 1 gets signals."""
    rank, found = accelerator.process_index, {}
    signals.CHECK_INTERVAL = 0.0
    endless = (time.sleep(0.002) or n for n in range(10_000))
    found["all batches"] = [*signals.watch(accelerator, range(3 + rank)), heard.cut_short]

    exchange, answers = Exchange(accelerator), []
    for step in range(6):
        heard.signal = signal.SIGUSR1 if rank == 1 and step >= 2 else 0
        answers.append(must_end(exchange))
    found["answers"] = answers

    few = range(3)  # rank 1 has fewer batches, and gets the signal in the last of them
    heard.signal = 0
    for n in signals.watch(accelerator, few if rank == 1 else endless):
        heard.signal = signal.SIGTERM if rank == 1 and n == 1 else 0
    found["left an endless evaluation"] = heard.cut_short
    found["saves after it"] = must_end(Exchange(accelerator))

    heard.signal, seen = 0, 0
    world = accelerator.num_processes  # it has no `reduce`, for which a batch would wait for the GPU
    communicating = SimpleNamespace(is_fsdp2=True, num_processes=world)
    found["all batches under FSDP"] = [*signals.watch(communicating, range(3)), heard.cut_short]
    for n in signals.watch(communicating, range(100)):
        seen += 1
        heard.signal = signal.SIGTERM if rank == 1 and n == 4 else 0
    found["batches under FSDP"] = [seen, heard.cut_short]

    heard.signal = signal.SIGUSR1 if rank == 1 else 0
    try:
        save_and_end(accelerator, folder, 6)  # the evaluation was cut short
    except Preempted:
        found["left"] = True
    return found


def test_processes_agree_on_a_signal_that_only_one_of_them_got(tmp_path):
    zero, one = runs.in_group(together, 2, tmp_path)
    # Rank 1 gets the signal before step 2 ends; the processes agree on it one step later.
    assert zero["answers"] == one["answers"] == [False, False, False, True, True, True]
    assert zero["all batches"] == [0, 1, 2, False]
    assert one["all batches"] == [0, 1, 2, 3, False]
    assert zero["left an endless evaluation"]
    assert one["left an endless evaluation"]
    assert zero["saves after it"]
    assert one["saves after it"], "it would train one more step, and evaluate after that step when it is resumed"
    assert zero["all batches under FSDP"] == one["all batches under FSDP"] == [0, 1, 2, False]
    assert zero["batches under FSDP"] == one["batches under FSDP"] == [6, True], "all stop one batch later"
    assert zero["left"]
    assert one["left"]
    left = json.loads((tmp_path / "PREEMPTED").read_text())
    assert (left["step"], left["signals"]) == (6, {"1": "SIGUSR1"})


# One process, from end to end


ALONE = SimpleNamespace(num_processes=1, is_main_process=True, is_fsdp2=False)


def test_a_single_process_notices_a_signal_in_the_same_step_and_writes_the_marker_after_the_checkpoint(
    tmp_path, capsys
):
    exchange, there = Exchange(ALONE), []
    assert not must_end(exchange)
    assert heard.something_to_save
    heard.signal = signal.SIGINT
    assert must_end(exchange)
    with pytest.raises(Preempted):
        save_and_end(ALONE, tmp_path, 3, lambda: there.append((tmp_path / "PREEMPTED").exists()))
    assert there == [False, True]
    assert "interrupted at step 3: checkpoint saved" in capsys.readouterr().out


def test_a_signal_ends_the_run_immediately_if_everything_is_saved(tmp_path):
    must_end(Exchange(ALONE))
    all_saved()
    assert not heard.something_to_save
    heard.signal, heard.output_dir = signal.SIGTERM, tmp_path
    with pytest.raises(Preempted):
        all_saved()
    assert json.loads((tmp_path / "PREEMPTED").read_text())["step"] is None


@pytest.fixture(scope="module")
def recipe():
    return runs.load_recipe("nlp")


@pytest.fixture(scope="module")
def whole(recipe, texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    runs.train(recipe, output, *texts, *FLAGS)
    return output


def signal_in(monkeypatch, module, name, when):
    """Deliver SIGTERM, noted as `signals.listen` would, in the call of `name` for which `when(progress)` is true."""
    original, calls = getattr(module, name), []

    def with_signal(*arguments, **more):
        calls.append(arguments)
        if when(len(calls)):
            heard.signal = signal.SIGTERM
        return original(*arguments, **more)

    monkeypatch.setattr(module, name, with_signal)


# Where the signal comes, and the step of the checkpoint that is then written.
POINTS = {
    "in a step": ("clip", lambda call: call == 5, 5),
    "in the first step": ("clip", lambda call: call == 1, 1),
    "in an evaluation": ("predict", lambda call: call == 1, 8),
    "in the last evaluation": ("evaluate", lambda call: call == 2, 16),
    "in a save": ("save", lambda call: call == 1, 9),
}


FREQUENT = ("in a step", "in a save")
POINT = [pytest.param(name, marks=() if name in FREQUENT else pytest.mark.clusters) for name in POINTS]


@pytest.mark.parametrize("point", POINT)
def test_an_interrupted_and_resumed_run_has_the_weights_and_record_of_an_uninterrupted_one(
    recipe, texts, whole, tmp_path, monkeypatch, point
):
    name, when, step = POINTS[point]
    output = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_in(patch, {"save": Saver, "clip": gradients}.get(name, recipe), name, when)
        with pytest.raises(Preempted):
            runs.train(recipe, output, *texts, *FLAGS)
    left = json.loads((output / "PREEMPTED").read_text())
    assert (left["step"], left["signals"]) == (step, {"0": "SIGTERM"})
    newest = resuming.checkpoints_of(output)[step]
    assert max(resuming.checkpoints_of(output)) == step
    assert resuming.problem_with(newest) is None
    owed = "evaluation" in point
    assert resuming.read_state(newest)["evaluation_owed"] == owed
    evaluated = {line["step"] for line in runs.metrics(output) if "eval_loss" in line}
    assert (step in evaluated) is False, "an incomplete evaluation was recorded"

    heard.signal, heard.something_to_save = 0, False
    if owed:
        with (output / "metrics.jsonl").open("a") as file:  # of a start that was killed after this evaluation
            file.write(json.dumps({"step": step, "eval_loss": 1.0}) + "\n")
    runs.train(recipe, output, *texts, *FLAGS)
    assert not (output / "PREEMPTED").exists()
    weights = [folder / "model/model.safetensors" for folder in (output, whole)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    ours, theirs = runs.metrics(output), runs.metrics(whole)
    for key in ("step", "samples", "learning_rate", "grad_norm", "eval_loss", "eval_accuracy"):
        assert [line.get(key) for line in ours] == [line.get(key) for line in theirs], key


def test_a_run_that_stopped_early_does_not_train_further_when_it_is_started_again(
    recipe, texts, tmp_path, monkeypatch, capsys
):
    flags = [*texts, *FLAGS, "--eval_steps", 2, "--early_stopping_patience", 1]
    flags += ["--metric_for_best_model", "loss", "--learning_rate", 10]
    with monkeypatch.context() as patch:
        patch.setattr(export.Export, "write", signal_in)  # its call raises a TypeError
        with pytest.raises(TypeError):
            runs.train(recipe, tmp_path / "run", *flags)
    stopped = max(resuming.checkpoints_of(tmp_path / "run"))
    assert stopped < STEPS
    assert f"early stopping after step {stopped}: 1 evaluation without a better result" in capsys.readouterr().out
    runs.train(recipe, tmp_path / "run", *flags)
    assert max(resuming.checkpoints_of(tmp_path / "run")) == stopped
    assert runs.metrics(tmp_path / "run")[-1]["step"] == stopped


def test_the_next_start_of_a_finished_run_writes_the_report_that_it_lacks_and_removes_the_marker(recipe, texts, whole):
    signals.write_marker(whole, None, {0: signal.SIGTERM})  # the signal came as the run ended
    (whole / "report.html").rename(whole / "report.html.partial-1")
    runs.train(recipe, whole, *texts, *FLAGS)
    assert {path.name for path in whole.iterdir()} == runs.FILES | {"mistakes.json"}


# Launched


LATE = """
import os, sys, time
sys.path.insert(0, {tests!r})
import runs
from shared.run import command

nlp = runs.load_recipe("nlp")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and os.environ["RANK"] == "0":
    time.sleep(3)  # rank 1 looks for it while the address from before the restart is still stored
command.run(nlp.main, nlp.Config)
"""


@pytest.mark.clusters
def test_torchrun_restarts_all_processes_if_only_one_gets_the_signal(texts, tmp_path_factory, tmp_path):
    steps = 60
    script = tmp_path_factory.mktemp("late") / "late.py"
    script.write_text(LATE.format(tests=str(runs.ROOT / "tests")))
    flags = [*texts, *FLAGS, "--max_train_steps", steps, "--eval_steps", steps, "--output_dir", tmp_path]
    command = runs.torchrun(2, "--max-restarts", 1, script, *flags, "--expect_processes", 2)
    launcher = runs.start(command, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    try:
        runs.wait_for_steps(launcher, tmp_path, 4)
        (one,) = (c for c in psutil.Process(launcher.pid).children() if c.environ().get("RANK") == "1")
        one.send_signal(signal.SIGUSR1)
        out, err = launcher.communicate(timeout=200)
    finally:
        runs.end(launcher)
    assert launcher.returncode == 0, err
    assert out.count(": checkpoint saved, start again to resume") == 1
    step = int(out.split("interrupted at step ")[1].split(":")[0])
    assert f"resumed from step_{step:08d}" in out
    assert [line["step"] for line in runs.training_lines(tmp_path)] == list(range(1, steps + 1))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*runs.FILES, "curves.png", "mistakes.json"}


@pytest.mark.clusters
def test_terminating_accelerate_launch_sends_its_process_a_signal(texts, tmp_path):
    flags = [*texts, *FLAGS, "--max_train_steps", 100_000, "--output_dir", tmp_path]
    launcher = runs.start(runs.accelerate_launch("cpu", "recipes/nlp.py", *flags), OMP_NUM_THREADS="1")
    try:
        runs.wait_for_steps(launcher, tmp_path, 2)
        (process,) = psutil.Process(launcher.pid).children()
        launcher.terminate()
        launcher.wait(60)
        process.wait(60)
        assert json.loads((tmp_path / "PREEMPTED").read_text())["signals"] == {"0": "SIGTERM"}
        assert resuming.checkpoints_of(tmp_path)
        assert not (tmp_path / ".lock").exists()
    finally:
        runs.end(launcher)
