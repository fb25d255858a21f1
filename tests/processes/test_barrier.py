"""Processes wait for a late process and not for a lost one, and share the result or error of one of them."""

import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import runs
import torch
from runs import problem_of

from shared.config.options import Options
from shared.errors import UserError
from shared.optimization.optimizers import make_optimizer
from shared.processes import barrier, collectives, preemption
from shared.run.training_run import Ddp

TIMEOUT, LATE = 4.0, 6.0  # seconds: timeout of the group, and time that one process works


def fail():
    raise UserError("of the main process")


def together(accelerator, folder):
    """What each of two processes observes when one is late, and when one is stopped."""
    rank, found = accelerator.process_index, {}
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    barrier.HEARTBEAT_INTERVAL, barrier.HEARTBEAT_TIMEOUT = 0.2, TIMEOUT
    cpu = torch._C._get_accelerator
    torch._C._get_accelerator = lambda *_: torch.device("cuda")  # as where processes share a GPU over gloo
    barrier.wait_for_all(accelerator)
    torch._C._get_accelerator = cpu
    torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), torch.distributed.group.WORLD)
    found["main"] = collectives.on_main_process(accelerator, lambda: time.sleep(LATE) or "late")

    found["before"] = barrier._barriers[0].calls
    found["gathered"] = collectives.gather(accelerator, rank)
    collectives.agree(accelerator, None)
    assert not preemption.cut_short(accelerator)
    model = torch.nn.Linear(2, 2)
    model, _ = Ddp().wrap(accelerator, model, make_optimizer(model, Options()))
    found["after"] = barrier._barriers[0].calls

    found["errors"] = [
        problem_of(collectives.agree, accelerator, UserError(f"of rank {rank}")),
        problem_of(collectives.agree, accelerator, UserError("of rank 1") if rank else None),
        problem_of(collectives.on_main_process, accelerator, fail),
    ]

    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        barrier.wait_for_all(accelerator)
    else:
        other = psutil.Process(int((folder / "pid-1").read_text()))
        found["lost"] = problem_of(barrier.wait_for_all, accelerator)
        other.send_signal(signal.SIGCONT)
    del model
    accelerator.free_memory()
    barrier.close()
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
    barrier.wait_for_all(alone)  # returns, although there is no group
    collectives.agree(alone, None)
    assert problem_of(collectives.agree, alone, UserError("mine")) == "mine"
