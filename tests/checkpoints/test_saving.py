"""Saving during training: the files, the effect of failures, and how Accelerate loads the result."""

import json
import os
import resource
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import runs
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn

from shared.checkpoints import buffers, resuming, saving
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.config.options import Options
from shared.errors import UserError
from shared.optimization.optimizers import make_optimizer
from shared.plan.batches import Plan

PLAN = Plan(num_samples=20, seed=0, global_batch_size=2, num_epochs=1)


@pytest.fixture
def run(tmp_path):
    """A model that is trained in this process, and its saver."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    config = Options(output_dir=str(tmp_path / "out"), checkpointing_steps="2", save_total_limit=2)
    (tmp_path / "out").mkdir()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model, optimizer = accelerator.prepare(model, make_optimizer(model, config))
    run = SimpleNamespace(accelerator=accelerator, config=config, model=model, optimizer=optimizer)
    run.saver, run.progress, run.folder = Saver(accelerator, config, PLAN), Progress(), tmp_path / "out/checkpoints"

    def step():
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.progress.step += 1
        run.saver.poll()
        if run.saver.is_due(run.progress):
            run.saver.save(run.progress, {})
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    run.step = step
    yield run
    if run.saver.staging.writer:
        run.saver.staging.writer.process.send_signal(signal.SIGCONT)
        run.saver.staging.writer.process.kill()
    run.saver.close()
    accelerator.free_memory()


@pytest.fixture
def synchronous(monkeypatch):
    monkeypatch.setattr(buffers, "available_memory", lambda: 100)


def stop(process):
    """Stop a process, and return when it has stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)


def assert_holds(checkpoint, weights):
    assert resuming.problem_with(checkpoint) is None
    tensors = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)


def test_training_continues_while_a_checkpoint_is_written_and_does_not_change_it(run):
    history = [run.step(), run.step()]
    run.saver.finish()
    run.saver = Saver(run.accelerator, run.config, PLAN)
    history += [run.step(), run.step()]  # starts the writer
    run.saver._look(wait=True)
    assert run.saver.problem is None
    stop(run.saver.staging.writer.process)
    history += [run.step(), run.step(), run.step()]
    assert set(resuming.complete(run.config.output_dir)) == {2, 4}
    run.saver.staging.writer.process.send_signal(signal.SIGCONT)
    history += [run.step()]  # waits for the checkpoint of step 6
    assert 6 in resuming.complete(run.config.output_dir)
    run.saver.finish()
    found = resuming.complete(run.config.output_dir)
    assert set(found) == {6, 8}
    for step, checkpoint in found.items():
        assert_holds(checkpoint, history[step - 1])
    assert {path.name for path in run.folder.iterdir()} == {"step_00000006", "step_00000008"}


def test_an_update_waits_for_the_copy_and_a_forward_pass_does_not(run, monkeypatch):
    events, may_copy = [], threading.Event()
    copy_all, hold = buffers.copy_all, buffers.Copy.hold

    def copy(places, tensors):
        if threading.current_thread() is not threading.main_thread():
            may_copy.wait()
            events.append("copied")
        copy_all(places, tensors)

    def held(self):
        events.append("held")
        may_copy.set()
        hold(self)

    monkeypatch.setattr(buffers, "copy_all", copy)
    run.step()
    weights = run.step()
    assert run.saver.copy
    assert not run.saver.copy.done()
    run.model(torch.randn(5, 3)).sum().backward()  # changes the statistics of batch norm, which are copied already
    monkeypatch.setattr(buffers.Copy, "hold", held)
    run.optimizer.step()
    assert events[:2] == ["held", "copied"]
    assert not torch.equal(run.model.state_dict()["0.weight"], weights["0.weight"])
    assert not torch.equal(run.model.state_dict()["1.running_mean"], weights["1.running_mean"])
    run.saver._look(wait=True)
    assert_holds(run.folder / "step_00000002", weights)


def test_a_checkpoint_is_not_saved_if_other_code_changes_parameters_during_the_copy(run, capfd, monkeypatch):
    monkeypatch.setattr(saving, "SECONDS_BETWEEN", 0.0)
    run.step(), run.step()
    with torch.no_grad():
        run.model[2].weight.mul_(2)
    run.step()
    problem = "code other than an optimizer step changed parameters while they were being copied"
    assert f"warning: cannot save {run.folder}/step_00000002 ({problem}); the" in capfd.readouterr().err
    weights = run.step()
    with torch.no_grad():
        run.model[2].weight.mul_(2)
    run.saver.finish()  # tries again with the current values
    assert set(resuming.complete(run.config.output_dir)) == {4}
    weights["2.weight"] *= 2
    assert_holds(run.folder / "step_00000004", weights)


@pytest.mark.parametrize("how", ["in the background", "synchronous"])
def test_accelerate_loads_a_saved_checkpoint(run, how, request, capfd):
    if how == "synchronous":
        request.getfixturevalue("synchronous")
    for _ in range(3):
        run.step()
    expected = torch.randn(3), torch.get_rng_state()
    run.step()
    drawn = torch.randn(4)
    run.saver.finish()
    warnings = capfd.readouterr().err
    assert warnings.count("checkpoints are written while the training waits: ") == (how == "synchronous")
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    state = run.optimizer.state_dict()
    exp_avg = [entry["exp_avg"].clone() for entry in state["state"].values()]
    del expected
    run.step()
    run.optimizer.param_groups[0]["lr"] = 7.0
    run.accelerator.load_state(str(run.folder / "step_00000004"))
    assert all(torch.equal(run.model.state_dict()[name], tensor) for name, tensor in weights.items())
    assert run.optimizer.param_groups[0]["lr"] == run.config.learning_rate
    again = [entry["exp_avg"] for entry in run.optimizer.state_dict()["state"].values()]
    assert all(torch.equal(a, b) for a, b in zip(exp_avg, again, strict=True))
    assert torch.equal(torch.randn(4), drawn)  # the random states are those at the save


def test_both_ways_of_saving_write_the_same_files(run, monkeypatch):
    run.step(), run.step()
    run.saver.finish()
    background = run.folder / "step_00000002"
    kept = background.rename(background.with_name("kept"))
    monkeypatch.setattr(buffers, "available_memory", lambda: 100)
    Saver(run.accelerator, run.config, PLAN).save(run.progress, {})
    assert {path.name for path in kept.iterdir()} == {path.name for path in background.iterdir()}
    (run.folder / "usual").touch()
    usual = (run.folder / "usual").stat().st_mode
    assert {path.stat().st_mode for folder in (kept, background) for path in folder.iterdir()} == {usual}
    assert (kept / "model.safetensors").read_bytes() == (background / "model.safetensors").read_bytes()
    ours, torchs = (torch.load(folder / "optimizer.bin", weights_only=True) for folder in (kept, background))
    assert str(ours) == str(torchs)


def test_a_killed_writer_causes_a_warning_and_the_next_save_works(run, capfd):
    run.step(), run.step()
    run.saver._look(wait=True)
    assert run.saver.problem is None
    stop(run.saver.staging.writer.process)
    run.step(), run.step()
    partial = run.saver.job.partial
    partial.mkdir()  # as a killed writer leaves it
    run.saver.staging.writer.process.kill()
    run.saver.staging.writer.process.wait()
    assert capfd.readouterr().err == ""
    run.step()
    assert capfd.readouterr().err == (
        f"warning: cannot save {run.folder}/step_00000004 (the process that writes it ended with exit code -9); "
        "the next save tries again\n"
    )
    assert not partial.exists()
    weights = run.step()
    run.saver.finish()
    assert set(resuming.complete(run.config.output_dir)) == {2, 6}
    assert_holds(run.folder / "step_00000006", weights)


@pytest.mark.parametrize("how", ["in the background", "synchronous"])
def test_a_failed_save_causes_a_warning_and_the_last_save_is_tried_again(run, how, request, capfd, monkeypatch):
    if how == "synchronous":
        request.getfixturevalue("synchronous")
    monkeypatch.setattr(saving, "SECONDS_BETWEEN", 0.0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run.step(), run.step()
    run.saver.finish()
    run.saver = Saver(run.accelerator, run.config, PLAN)
    run.saver.save(run.progress, {})  # allocates the memory
    run.saver._look(wait=True)
    lost = run.folder.rename(run.folder.with_name("elsewhere"))
    run.folder.write_text("a file where the folder was")
    for _ in range(4):
        run.step()
    run.saver._look(wait=True)
    warnings = capfd.readouterr().err
    for step in (4, 6):
        assert f"warning: cannot save {run.folder}/step_{step:08d} (" in warnings
    assert warnings.count("MB are needed, and in") == 2
    with pytest.raises(
        UserError, match=r"cannot save .*step_00000006 \(.*\): free space, or set another --output_dir$"
    ):
        run.saver.finish()
    assert capfd.readouterr().err.count("; trying again in 0 s") == saving.ATTEMPTS - 1

    def repair(_):
        run.folder.unlink(missing_ok=True)
        if lost.exists():
            lost.rename(run.folder)

    monkeypatch.setattr(time, "sleep", repair)
    run.saver = Saver(run.accelerator, run.config, PLAN)
    run.saver.save(run.progress, {})
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.saver.finish()
    assert_holds(run.folder / "step_00000006", weights)
    assert set(resuming.complete(run.config.output_dir)) == {2, 6}
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == limits


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB in memory."""
    folder = tmp_path / "small"
    folder.mkdir()
    if problem := runs.mount_in_memory(folder, "size=8m"):
        pytest.skip(f"no file system can be mounted here: {problem}")
    yield folder
    runs.unmount(folder)


@pytest.mark.parametrize("checked", [True, False])
def test_a_disk_that_fills_up_keeps_the_older_checkpoint_and_its_free_space(small_disk, checked, capfd, monkeypatch):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1024, 1024))  # 4.2 MB
    config = Options(output_dir=str(small_disk), save_total_limit=1)
    saver = Saver(accelerator, config, PLAN)
    saver.save(Progress(step=2), {})
    saver._look(wait=True)
    if not checked:  # the check found enough free space
        monkeypatch.setattr(buffers, "available_memory", lambda: 100)
        saver.close()
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
        saver = Saver(accelerator, config, PLAN)
    before = shutil.disk_usage(small_disk).free
    saver.save(Progress(step=4), {})
    saver._look(wait=True)
    reason = "not enough space" if checked else "No space left on device"
    warnings = capfd.readouterr().err
    assert f"step_00000004 ({reason}" in warnings or (reason in warnings and not checked)
    assert "4.2 MB are needed, and in" in warnings
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == ["step_00000002"]
    assert shutil.disk_usage(small_disk).free == before
    assert resuming.problem_with(small_disk / "checkpoints/step_00000002") is None
    (small_disk / "checkpoints/step_00000002").rename(small_disk / "checkpoints/step_00000001")
    shutil.rmtree(small_disk / "checkpoints/step_00000001")
    saver.save(Progress(step=6), {})
    saver.finish()
    assert set(resuming.complete(small_disk)) == {6}
    accelerator.free_memory()


def test_a_state_that_changes_its_shape_gets_a_new_layout(run):
    run.step(), run.step()
    run.optimizer.param_groups[0]["betas"] = (0.5, 1)  # an integer among the floats
    run.step(), run.step()
    run.saver.finish()
    state = torch.load(run.folder / "step_00000004/optimizer.bin", weights_only=True)
    assert state["param_groups"][0]["betas"] == (0.5, 1)


def test_state_json_has_the_step_the_epoch_and_the_number_of_processes(run):
    run.step(), run.step()
    run.saver.finish()
    state = json.loads((run.folder / "step_00000002/state.json").read_text())
    assert (state["step"], state["epoch"], state["world_size"]) == (2, 0, 1)


def test_a_prepared_object_that_cannot_be_saved_fails_an_assertion(run):
    run.accelerator._schedulers.append(torch.optim.lr_scheduler.ConstantLR(run.optimizer.optimizer))
    with pytest.raises(AssertionError):
        Saver(run.accelerator, run.config, PLAN)
    run.accelerator._schedulers.clear()
