"""Machines with separate folders agree on what they resume and remove; a wrong setting is detected at the start."""

import socket

import pytest
import runs
import torch
from torch import nn

from shared.checkpoints import resuming, saving
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.config.options import Options
from shared.errors import UserError
from shared.optimization.optimizers import make_optimizer
from shared.plan.batches import Plan
from shared.processes import writers
from shared.processes.writers import check_shared, on_writers
from shared.run import run_folder


def refusal(function, *args):
    try:
        function(*args)
    except UserError as error:
        return str(error)
    return None


def on_two_machines(accelerator, folder):
    """Each process is a machine; returns all that the tests look at, because starting the processes takes seconds."""
    rank, said = accelerator.process_index, {}
    writers.SECONDS_TO_APPEAR = 0.3
    saving.SECONDS_BETWEEN = 0.0
    own, shared = folder / f"own-{rank}", folder / "shared"
    for path in (own, shared):
        path.mkdir(exist_ok=True)
    torch.distributed.barrier()

    def options(output_dir, **values):
        return Options(output_dir=str(output_dir), save_total_limit=1, mixed_precision="no", **values)

    each = options(own, save_on_each_node=True)
    said["own, given"] = refusal(check_shared, accelerator, each)
    said["own, not given"] = refusal(check_shared, accelerator, options(own))
    said["shared, given"] = refusal(check_shared, accelerator, options(shared, save_on_each_node=True))
    said["shared, not given"] = refusal(check_shared, accelerator, options(shared))
    said["writers"] = [on_writers(accelerator, config, lambda: rank) for config in (options(shared), each)]
    said["left"] = [path.name for path in (*own.iterdir(), *shared.iterdir())]

    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, each))
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()

    saver = Saver(accelerator, each, Plan(num_samples=20, seed=0, global_batch_size=2, num_epochs=1))

    def save(step):
        optimizer.param_groups[0]["params"][0].data.fill_(step)
        saver.save(Progress(step=step), {})
        saver._look(wait=True)
        return sorted(resuming.complete(own))

    def found():
        found = resuming.find(accelerator, each)
        return found and [str(found[0]), found[1]["step"]]

    said["nothing"] = found()
    said["saved"] = [save(3), save(6)]
    torch.distributed.barrier()
    if rank == 1:  # its disk is lost for two saves
        (own / "checkpoints").rename(own / "lost")
        (own / "checkpoints").write_text("a file where the folder was")
    said["failing"] = [save(9), save(12)]
    if rank == 1:
        (own / "checkpoints").unlink()
        (own / "lost").rename(own / "checkpoints")
    said["again"] = save(15)
    said["newest"] = found()
    torch.distributed.barrier()
    if rank == 0:
        (own / "checkpoints/step_00000015/state.json").write_text("damaged")
    torch.distributed.barrier()
    said["older"] = found()
    saver.save(Progress(step=18), {})
    saver.finish()
    said["end"] = sorted(resuming.complete(own))
    if rank == 1:  # is replaced by one with an empty disk
        (own / "checkpoints").rename(own / "lost")
    said["replaced"] = refusal(found)
    if rank == 1:
        (own / "lost").rename(own / "checkpoints")
    torch.distributed.barrier()
    checkpoint = resuming.complete(own)[18]
    said["files"] = sorted(path.name for path in checkpoint.iterdir())
    resuming.load(accelerator, checkpoint)
    said["loaded"] = optimizer.param_groups[0]["params"][0].unique().tolist()
    said["opened"] = str(run_folder.open_run(accelerator, each)[2])
    said["damaged, by path"] = refusal(
        resuming.find,
        accelerator,
        options(own, save_on_each_node=True, resume_from_checkpoint=str(own / "checkpoints/step_00000015")),
    )
    said["finished"] = run_folder.finished(accelerator, each, Progress(), tuple)
    accelerator.free_memory()
    return said


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machines")
    return *runs.in_group(on_two_machines, 2, folder, machines=True), folder


def test_a_folder_that_is_not_shared_needs_the_flag_and_a_shared_one_refuses_it(said):
    for rank, machine in enumerate(said[:2]):
        assert machine["own, given"] is None
        assert machine["shared, not given"] is None
        assert machine["own, not given"] == (
            f"--output_dir {said[2]}/own-{rank} is not shared, 1 of 2 machines do not see what the "
            "main process writes: name a folder on a shared file system, or give --save_on_each_node"
        )
        assert machine["shared, given"].startswith(
            f"--save_on_each_node, but --output_dir {said[2]}/shared is shared by several machines"
        )
        assert machine["left"] == []
        assert machine["writers"] == [[0], [0, 1]]


def test_each_machine_has_whole_checkpoints(said):
    for machine in said[:2]:
        assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl"} < set(
            machine["files"]
        )
        assert machine["loaded"] == [15.0]


def test_a_start_takes_the_newest_one_that_is_intact_on_every_machine(said):
    for rank, machine in enumerate(said[:2]):
        assert machine["nothing"] is None
        assert machine["newest"] == [f"{said[2]}/own-{rank}/checkpoints/step_00000015", 15]
        assert machine["older"] == [f"{said[2]}/own-{rank}/checkpoints/step_00000006", 6]
        assert f"own-{rank}/checkpoints/step_00000018" in machine["opened"]
        assert machine["finished"] is None


def test_no_machine_removes_what_another_may_need(said):
    main, other, _ = said
    assert main["saved"] == other["saved"] == [[3], [3, 6]]
    assert (main["failing"], other["failing"]) == ([[6, 9], [6, 9, 12]], [[], []])
    assert (main["again"], other["again"]) == ([6, 9, 12, 15], [6, 15])


def test_when_all_have_the_last_one_the_limit_holds(said):
    assert said[0]["end"] == said[1]["end"] == [18]


def test_a_machine_with_an_empty_disk_does_not_make_the_run_start_over(said):
    for rank, machine in enumerate(said[:2]):
        path = f"{said[2]}/own-{rank}/checkpoints"
        host = socket.gethostname()
        assert machine["replaced"] == (
            f"checkpoint {path}/step_00000018 is intact on machine 0 ({host}) but not on machine 1 ({host}): copy that "
            f"folder from machine 0, remove {path} on all of them to start over, or name another --output_dir"
        )


def test_a_damaged_one_on_one_machine_is_refused_by_all(said):
    for machine in said[:2]:
        assert "state.json is damaged" in machine["damaged, by path"] or "no such folder" in machine["damaged, by path"]
