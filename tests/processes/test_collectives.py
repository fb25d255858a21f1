"""Machines agree on what they resume and remove; processes wait for late ones and not for lost ones."""

import os
import signal
import socket
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import runs
import torch
from runs import problem_of
from torch import nn

from shared.checkpoints import resuming, saving
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.config.options import Options
from shared.errors import UserError
from shared.optimization.optimizers import make_optimizer
from shared.plan.batches import Plan
from shared.processes import collectives, signals
from shared.processes.collectives import check_shared, on_writers
from shared.run import resume
from shared.run.training_run import Ddp


def on_two_machines(accelerator, folder):
    """Each process acts as a machine. Return all that the tests check, because starting the processes takes seconds."""
    rank, results = accelerator.process_index, {}
    collectives.SECONDS_TO_APPEAR = 0.3
    saving.SECONDS_BETWEEN = 0.0
    own, shared = folder / f"own-{rank}", folder / "shared"
    for path in (own, shared):
        path.mkdir(exist_ok=True)
    torch.distributed.barrier()

    def options(output_dir, **values):
        return Options(output_dir=str(output_dir), save_total_limit=1, mixed_precision="no", **values)

    each = options(own, save_on_each_node=True)
    results["own, given"] = problem_of(check_shared, accelerator, each)
    results["own, not given"] = problem_of(check_shared, accelerator, options(own))
    results["shared, given"] = problem_of(check_shared, accelerator, options(shared, save_on_each_node=True))
    results["shared, not given"] = problem_of(check_shared, accelerator, options(shared))
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
        saver.poll(wait=True)
        return sorted(resuming.checkpoints_of(own))

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
    results["end"] = sorted(resuming.checkpoints_of(own))
    if rank == 1:  # a machine with an empty disk replaces it
        (own / "checkpoints").rename(own / "lost")
    results["replaced"] = problem_of(found)
    if rank == 1:
        (own / "lost").rename(own / "checkpoints")
    torch.distributed.barrier()
    checkpoint = resuming.checkpoints_of(own)[18]
    results["files"] = sorted(path.name for path in checkpoint.iterdir())
    saver.load(checkpoint)
    results["loaded"] = optimizer.param_groups[0]["params"][0].unique().tolist()
    *_, checkpoint, results["finished"] = resume.open_run(accelerator, each, [])
    results["opened"] = str(checkpoint)
    results["damaged, by path"] = problem_of(
        resuming.find,
        accelerator,
        options(own, save_on_each_node=True, resume_from_checkpoint=str(own / "checkpoints/step_00000015")),
    )
    accelerator.free_memory()
    return results


def test_machines_with_separate_folders_resume_from_the_same_checkpoint_and_lose_none(tmp_path):
    machines = runs.in_group(on_two_machines, 2, tmp_path, machines=True)
    host = socket.gethostname()
    for rank, machine in enumerate(machines):
        own = f"{tmp_path}/own-{rank}"
        # Separate folders need --save_on_each_node, and a shared one refuses it.
        assert machine["own, given"] is None
        assert machine["shared, not given"] is None
        assert machine["own, not given"].startswith(f"--output_dir {own} is not shared")
        assert machine["shared, given"].startswith(f"--save_on_each_node, but --output_dir {tmp_path}/shared is shared")
        assert machine["left"] == []
        assert machine["writers"] == [[0], [0, 1]]
        # Each machine has complete checkpoints, and resumes from the newest one that is intact on every machine.
        assert {"model.safetensors", "optimizer.safetensors", "state.json"} < set(machine["files"])
        assert machine["loaded"] == [15.0]
        assert machine["nothing"] is None
        assert machine["newest"] == [f"{own}/checkpoints/step_00000015", 15]
        assert machine["older"] == [f"{own}/checkpoints/step_00000006", 6]
        assert f"own-{rank}/checkpoints/step_00000018" in machine["opened"]
        assert not machine["finished"]
        # The limit holds when all machines have the last checkpoint.
        assert machine["end"] == [18]
        # A machine with an empty disk is refused; it does not start over.
        missing = f"checkpoint {own}/checkpoints/step_00000018 is intact on machine 0 ({host}) but not on machine 1"
        assert machine["replaced"].startswith(missing)
        # All refuse a checkpoint that is damaged on one.
        said = machine["damaged, by path"]
        assert "state.json is damaged" in said or "it cannot be read" in said
    # No machine removes a checkpoint that another may need.
    main, other = machines
    assert main["saved"] == other["saved"] == [[3], [3, 6]]
    assert (main["failing"], other["failing"]) == ([6, 9], [])
    assert (main["again"], other["again"]) == ([6, 9, 15], [6, 15])


TIMEOUT, LATE = 4.0, 6.0  # seconds: timeout of the group, and time that one process works


def fail():
    raise UserError("of the main process")


def together(accelerator, folder):
    """What each of two processes observes when one is late, and when one is stopped."""
    rank, found = accelerator.process_index, {}
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    collectives.HEARTBEAT_INTERVAL, collectives.HEARTBEAT_TIMEOUT = 0.2, TIMEOUT
    cpu = torch._C._get_accelerator
    torch._C._get_accelerator = lambda *_: torch.device("cuda")  # as where processes share a GPU over gloo
    collectives.wait_for_all(accelerator)
    torch._C._get_accelerator = cpu
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), torch.distributed.group.WORLD)
    found["main"] = collectives.on_main_process(accelerator, lambda: time.sleep(LATE) or "late")

    found["before"] = collectives._barriers[0].calls
    found["gathered"] = collectives.gather(accelerator, rank)
    collectives.agree(accelerator, None)
    assert [*signals.watch(accelerator, "ab"), signals.heard.cut_short] == ["a", "b", False]
    model = torch.nn.Linear(2, 2)
    model, _ = Ddp().wrap(accelerator, model, make_optimizer(model, Options()))
    found["after"] = collectives._barriers[0].calls

    found["errors"] = [
        problem_of(collectives.agree, accelerator, UserError(f"of rank {rank}")),
        problem_of(collectives.agree, accelerator, UserError("of rank 1") if rank else None),
        problem_of(collectives.on_main_process, accelerator, fail),
    ]

    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        collectives.wait_for_all(accelerator)
    else:
        other = psutil.Process(int((folder / "pid-1").read_text()))
        found["lost"] = problem_of(collectives.wait_for_all, accelerator)
        other.send_signal(signal.SIGCONT)
    del model
    accelerator.free_memory()
    collectives.close()
    return found


def test_processes_wait_for_a_late_one_share_results_and_errors_and_name_a_lost_one(tmp_path):
    found = runs.in_group(together, 2, tmp_path)
    for rank in found:
        assert rank["main"] == "late"  # by more than the timeout of the group
        assert rank["gathered"] == [0, 1]
        assert (rank["before"], rank["after"]) == (2, 6), "a wait before each exchange, and before DDP"
        assert rank["errors"] == ["of rank 0", "of rank 1", "of the main process"]
    assert found[0]["lost"].startswith("process 1 has sent no heartbeat for 4 s: ")


def test_a_single_process_does_not_wait():
    alone = SimpleNamespace(num_processes=1)
    collectives.wait_for_all(alone)  # returns, although there is no group
    collectives.agree(alone, None)
    assert problem_of(collectives.agree, alone, UserError("mine")) == "mine"
