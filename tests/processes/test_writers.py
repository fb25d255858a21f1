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
    """Each process acts as a machine. Return all that the tests check, because starting the processes takes seconds."""
    rank, results = accelerator.process_index, {}
    writers.SECONDS_TO_APPEAR = 0.3
    saving.SECONDS_BETWEEN = 0.0
    own, shared = folder / f"own-{rank}", folder / "shared"
    for path in (own, shared):
        path.mkdir(exist_ok=True)
    torch.distributed.barrier()

    def options(output_dir, **values):
        return Options(output_dir=str(output_dir), save_total_limit=1, mixed_precision="no", **values)

    each = options(own, save_on_each_node=True)
    results["own, given"] = refusal(check_shared, accelerator, each)
    results["own, not given"] = refusal(check_shared, accelerator, options(own))
    results["shared, given"] = refusal(check_shared, accelerator, options(shared, save_on_each_node=True))
    results["shared, not given"] = refusal(check_shared, accelerator, options(shared))
    results["writers"] = [on_writers(accelerator, config, lambda: rank) for config in (options(shared), each)]
    results["left"] = [path.name for path in (*own.iterdir(), *shared.iterdir())]

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

    results["nothing"] = found()
    results["saved"] = [save(3), save(6)]
    torch.distributed.barrier()
    if rank == 1:  # its disk fails for a save
        (own / "checkpoints").rename(own / "lost")
        (own / "checkpoints").write_text("a file where the folder was")
    results["failing"] = save(9)
    if rank == 1:
        (own / "checkpoints").unlink()
        (own / "lost").rename(own / "checkpoints")
    results["again"] = save(15)
    results["newest"] = found()
    torch.distributed.barrier()
    if rank == 0:
        (own / "checkpoints/step_00000015/state.json").write_text("damaged")
    torch.distributed.barrier()
    results["older"] = found()
    saver.save(Progress(step=18), {})
    saver.finish()
    results["end"] = sorted(resuming.complete(own))
    if rank == 1:  # a machine with an empty disk replaces it
        (own / "checkpoints").rename(own / "lost")
    results["replaced"] = refusal(found)
    if rank == 1:
        (own / "lost").rename(own / "checkpoints")
    torch.distributed.barrier()
    checkpoint = resuming.complete(own)[18]
    results["files"] = sorted(path.name for path in checkpoint.iterdir())
    resuming.load(accelerator, checkpoint)
    results["loaded"] = optimizer.param_groups[0]["params"][0].unique().tolist()
    results["opened"] = str(run_folder.open_run(accelerator, each, [])[2])
    results["damaged, by path"] = refusal(
        resuming.find,
        accelerator,
        options(own, save_on_each_node=True, resume_from_checkpoint=str(own / "checkpoints/step_00000015")),
    )
    results["finished"] = run_folder.finished(accelerator, each, Progress(), tuple)
    accelerator.free_memory()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machines")
    return *runs.in_group(on_two_machines, 2, folder, machines=True), folder


def test_separate_folders_need_save_on_each_node_and_a_shared_folder_refuses_it(results):
    for rank, machine in enumerate(results[:2]):
        assert machine["own, given"] is None
        assert machine["shared, not given"] is None
        assert machine["own, not given"] == (
            f"--output_dir {results[2]}/own-{rank} is not shared, 1 of 2 machines do not see what the "
            "main process writes: name a folder on a shared file system, or give --save_on_each_node"
        )
        assert machine["shared, given"].startswith(
            f"--save_on_each_node, but --output_dir {results[2]}/shared is shared by several machines"
        )
        assert machine["left"] == []
        assert machine["writers"] == [[0], [0, 1]]


def test_each_machine_has_complete_checkpoints(results):
    for machine in results[:2]:
        assert {"model.safetensors", "optimizer.safetensors", "state.json"} < set(machine["files"])
        assert machine["loaded"] == [15.0]


def test_a_run_resumes_from_the_newest_checkpoint_that_is_intact_on_every_machine(results):
    for rank, machine in enumerate(results[:2]):
        assert machine["nothing"] is None
        assert machine["newest"] == [f"{results[2]}/own-{rank}/checkpoints/step_00000015", 15]
        assert machine["older"] == [f"{results[2]}/own-{rank}/checkpoints/step_00000006", 6]
        assert f"own-{rank}/checkpoints/step_00000018" in machine["opened"]
        assert machine["finished"] is None


def test_no_machine_removes_a_checkpoint_that_another_may_need(results):
    main, other, _ = results
    assert main["saved"] == other["saved"] == [[3], [3, 6]]
    assert (main["failing"], other["failing"]) == ([6, 9], [])
    assert (main["again"], other["again"]) == ([6, 9, 15], [6, 15])


def test_the_limit_holds_when_all_machines_have_the_last_checkpoint(results):
    assert results[0]["end"] == results[1]["end"] == [18]


def test_a_machine_with_an_empty_disk_is_refused_instead_of_starting_over(results):
    for rank, machine in enumerate(results[:2]):
        path = f"{results[2]}/own-{rank}/checkpoints"
        host = socket.gethostname()
        assert machine["replaced"] == (
            f"checkpoint {path}/step_00000018 is intact on machine 0 ({host}) but not on machine 1 ({host}): copy that "
            f"folder from there, remove {path} on all of them to start over, or name another --output_dir"
        )


def test_all_machines_refuse_a_checkpoint_that_is_damaged_on_one(results):
    for machine in results[:2]:
        assert "state.json is damaged" in machine["damaged, by path"] or "no such folder" in machine["damaged, by path"]
