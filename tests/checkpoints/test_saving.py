"""Saving during training: the files, the memory it takes, and the effect of failures."""

import dataclasses
import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shared.checkpoints import folders, resuming, saving, staging
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.checkpoints.staging import Staging
from shared.config.options import Options
from shared.errors import UserError
from shared.optimization.optimizers import make_optimizer
from shared.plan.batches import Plan

PLAN = Plan(num_samples=20, seed=0, global_batch_size=2, num_epochs=1)


@pytest.fixture
def run(accelerator, tmp_path):
    """A model that is trained in this process, and its saver."""
    torch.manual_seed(0)
    config = Options(output_dir=str(tmp_path / "out"), checkpointing_steps="2", save_total_limit=2, failed_saves="end")
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
    run.saver.close()


@pytest.fixture(params=["in the background", "while the training waits"])
def how(request, monkeypatch):
    """How the checkpoints are written."""
    if request.param == "while the training waits":
        monkeypatch.setattr(staging, "available_memory", lambda: 100)
    return request.param


@pytest.fixture
def gate(monkeypatch):
    """An event without which no checkpoint is written."""
    gate, write = threading.Event(), folders.write_checkpoint
    gate.set()
    monkeypatch.setattr(folders, "write_checkpoint", lambda job: gate.wait() and write(job))
    yield gate
    gate.set()


@pytest.fixture
def may_copy(monkeypatch):
    """An event without which no tensor is copied during the next step."""
    may_copy, copy_all = threading.Event(), staging.copy_all
    may_copy.set()

    def copy(places, tensors):
        assert threading.current_thread() is threading.main_thread() or may_copy.wait()
        copy_all(places, tensors)

    monkeypatch.setattr(staging, "copy_all", copy)
    yield may_copy
    may_copy.set()


def assert_holds(checkpoint, weights):
    assert resuming.problem_with(checkpoint) is None
    tensors = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)


def test_training_continues_while_a_checkpoint_is_written_and_does_not_change_it(run, gate):
    history = [run.step(), run.step()]
    run.saver.finish()
    run.saver = Saver(run.accelerator, run.config, PLAN)
    history += [run.step(), run.step()]
    run.saver.poll(wait=True)
    assert run.saver.problem is None
    gate.clear()
    history += [run.step(), run.step(), run.step()]
    assert set(resuming.checkpoints_of(run.config.output_dir)) == {2, 4}
    gate.set()
    history += [run.step()]  # waits for the checkpoint of step 6
    assert 6 in resuming.checkpoints_of(run.config.output_dir)
    run.saver.finish()
    found = resuming.checkpoints_of(run.config.output_dir)
    assert set(found) == {6, 8}
    for step, checkpoint in found.items():
        assert_holds(checkpoint, history[step - 1])
    assert {path.name for path in run.folder.iterdir()} == {"step_00000006", "step_00000008"}


def test_an_update_waits_for_the_copy_and_a_forward_pass_does_not(run, may_copy, monkeypatch):
    run.step()
    may_copy.clear()
    weights = run.step()
    run.model(torch.randn(5, 3)).sum().backward()  # changes the statistics of batch norm, which are copied already
    assert not run.saver.job.copied.done()
    before_update = run.saver._before_update
    monkeypatch.setattr(run.saver, "_before_update", lambda: may_copy.set() or before_update())
    run.optimizer.step()
    assert run.saver.job.copied.done()
    assert not torch.equal(run.model.state_dict()["0.weight"], weights["0.weight"])
    assert not torch.equal(run.model.state_dict()["1.running_mean"], weights["1.running_mean"])
    run.saver.poll(wait=True)
    assert_holds(run.folder / "step_00000002", weights)


def test_the_copy_takes_one_thread_and_the_training_keeps_its_own(run, monkeypatch):
    """A second team of OpenMP would slow down every later step: see `Staging`."""
    threads = {}
    monkeypatch.setattr(
        staging, "copy_all", lambda *_: threads.update({threading.current_thread().name: torch.get_num_threads()})
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run.step()
        run.step()
        run.saver.poll(wait=True)
        assert threads == {threading.main_thread().name: 2, "checkpoint_0": 1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_checkpoint_is_not_saved_if_other_code_changes_parameters_during_the_copy(run, may_copy, capfd, monkeypatch):
    monkeypatch.setattr(saving, "SECONDS_BETWEEN", 0.0)

    def double_during_the_copy():
        with torch.no_grad():
            run.model[2].weight.mul_(2)
        may_copy.set()

    run.step(), may_copy.clear(), run.step()
    double_during_the_copy()
    run.step()
    run.saver.poll(wait=True)
    problem = "code other than an optimizer step changed parameters while they were being copied"
    assert f"warning: cannot save {run.folder}/step_00000002 ({problem})\n" in capfd.readouterr().err
    weights = run.step()  # waits for this save, because the last one failed
    assert_holds(run.folder / "step_00000004", weights)
    run.step(), may_copy.clear()
    weights = run.step()
    double_during_the_copy()
    run.saver.finish()  # tries again with the current values
    weights["2.weight"] *= 2
    assert_holds(run.folder / "step_00000006", weights)


def test_both_ways_of_saving_write_the_same_files(run, monkeypatch, capfd):
    run.step(), run.step()
    run.saver.finish()
    background = run.folder / "step_00000002"
    kept = background.rename(background.with_name("kept"))
    monkeypatch.setattr(staging, "available_memory", lambda: 100)
    Saver(run.accelerator, run.config, PLAN).save(run.progress, {})
    assert capfd.readouterr().err.count("checkpoints are written while the training waits: ") == 1
    assert {path.name for path in kept.iterdir()} == {path.name for path in background.iterdir()}
    (run.folder / "usual").touch()
    usual = (run.folder / "usual").stat().st_mode
    assert {path.stat().st_mode for folder in (kept, background) for path in folder.iterdir()} == {usual}
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (kept / name).read_bytes() == (background / name).read_bytes()


def full_disk(monkeypatch, attempts=10**9):
    """Let this many attempts to write a checkpoint fail as on a full disk; return the list of all attempts."""
    made, write_file = [], folders.write_file

    def full(path, pieces):
        if path.name == "model.safetensors":
            made.append(path)
            if len(made) <= attempts:
                raise OSError(28, "No space left on device")
        return write_file(path, pieces)

    monkeypatch.setattr(folders, "write_file", full)
    return made


def test_a_failed_save_causes_a_warning_and_the_last_save_is_tried_again(run, how, capfd, monkeypatch):
    monkeypatch.setattr(saving, "SECONDS_BETWEEN", 0.0)
    attempts = full_disk(monkeypatch, attempts=2 * saving.ATTEMPTS - 1)
    run.step()
    weights = run.step()
    with pytest.raises(UserError, match=r"cannot save .*step_00000002 \(.*\): .*, or set another --output_dir$"):
        run.saver.finish()
    assert capfd.readouterr().err.count(f"warning: cannot save {run.folder}/step_00000002 (") == saving.ATTEMPTS
    run.saver = Saver(run.accelerator, run.config, PLAN)
    run.saver.save(run.progress, {})
    run.saver.finish()
    assert len(attempts) == 2 * saving.ATTEMPTS
    assert_holds(run.folder / "step_00000002", weights)


def test_two_failed_saves_in_a_row_end_the_run_if_failed_saves_is_end(run, capfd, monkeypatch):
    run.step(), run.step()
    run.saver.poll(wait=True)
    full_disk(monkeypatch)
    for _ in range(3):
        run.step()
    with pytest.raises(UserError, match=r"step_00000006 \(.*No space left .*: free space, or set another"):
        run.step()
    assert set(resuming.checkpoints_of(run.config.output_dir)) == {2}
    assert capfd.readouterr().err.count("No space left") == 2


def test_two_failed_saves_in_a_row_make_the_run_wait_and_the_second_is_tried_again(run, how, capfd, monkeypatch):
    monkeypatch.setattr(saving, "BETWEEN_ATTEMPTS", 0.0)
    run.saver.config = dataclasses.replace(run.config, failed_saves="wait")
    attempts = full_disk(monkeypatch, attempts=4)  # the save of step 2, and three of the save of step 4
    history = [run.step() for _ in range(4)]
    assert len(attempts) == 5
    assert set(resuming.checkpoints_of(run.config.output_dir)) == {4}
    assert_holds(run.folder / "step_00000004", history[3])
    said = capfd.readouterr().err
    assert said.count(": free space\nthe run waits for that, and tries again each minute\n") == 3
    run.saver.finish()


def test_a_registered_object_that_is_no_module_is_refused(run):
    run.accelerator.register_for_checkpointing(torch.optim.SGD(run.model.parameters(), lr=1.0))
    with pytest.raises(UserError, match="a checkpoint cannot hold SGD: register modules of torch"):
        Saver(run.accelerator, run.config, PLAN)


@pytest.fixture
def files():
    return {"model.safetensors": dict(nn.Linear(3, 2).state_dict())}


def test_too_little_memory_is_an_error_that_names_the_needed_and_the_free_memory(files, monkeypatch):
    monkeypatch.setattr(staging, "available_memory", lambda: 100)
    with pytest.raises(MemoryError, match="0 MB of memory are needed, and 0 MB are free"):
        Staging(files)


def test_the_available_memory_is_known_and_plausible():
    assert 1 << 20 < staging.available_memory() < 1 << 50


def test_a_state_of_other_shapes_or_names_does_not_fit(files):
    memory = Staging(files)
    assert memory.fits({name: {key: t + 1 for key, t in of_file.items()} for name, of_file in files.items()})
    assert not memory.fits({"model.safetensors": {"weight": torch.ones(2, 3)}})
    assert not memory.fits({name: {key: t.double() for key, t in of_file.items()} for name, of_file in files.items()})
    memory.close()


@pytest.mark.parametrize("is_cuda", [False, True])
def test_only_a_state_on_a_gpu_is_copied_in_a_stream_that_waits_for_the_training(files, monkeypatch, is_cuda):
    """Otherwise a CUDA context would take memory of a GPU, and would fail if another process uses it exclusively."""
    gpu, placed = MagicMock(), type("Placed", (torch.Tensor,), {"is_cuda": is_cuda})
    gpu.cudart().cudaHostRegister.return_value = 0
    gpu.reset_mock()
    for name in ("is_available", "cudart", "Stream", "current_stream", "stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, getattr(gpu, name))
    monkeypatch.setattr(staging, "copy_all", gpu.copy_all)
    state = {"file": {name: tensor.as_subclass(placed) for name, tensor in files["model.safetensors"].items()}}
    memory = Staging(state)
    memory.copy(state, {state["file"]["weight"].data_ptr()}).result()
    memory.close()
    found = ["cudart", "cudart().cudaHostRegister", "Stream", "copy_all", "current_stream", "Stream().wait_stream"]
    found += ["stream", "stream().__enter__", "copy_all", "stream().__exit__"]
    found += ["Event", "Stream().record_event", "Stream().record_event().synchronize"]
    found += ["cudart", "cudart().cudaHostUnregister"]
    seen = [name for name, *_ in gpu.mock_calls if not name.endswith(("__bool__", "__int__"))]
    assert seen == (found if is_cuda else ["copy_all", "copy_all"])


def test_the_limits_of_the_groups_around_the_own_one_count(tmp_path, monkeypatch):
    """A scheduler may limit the group of a job, and a process of it is in a group inside."""
    groups = tmp_path / "groups"
    for name, limit in (("job", "5000"), ("job/task", "max")):
        (groups / name).mkdir(parents=True)
        for file, text in (("max", limit), ("current", "3000"), ("stat", "inactive_file 100\nactive_file 10")):
            (groups / name / f"memory.{file}").write_text(text)
    (tmp_path / "own").write_text("1:cpu:/\n0::/job/task\n")
    places = {"/sys/fs/cgroup": groups, "/proc/self/cgroup": tmp_path / "own"}
    monkeypatch.setattr(staging, "Path", lambda name: places[name])
    assert staging.available_memory() == 5000 - 3000 + 110
