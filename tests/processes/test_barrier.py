"""Processes wait longer than the group's timeout for a late process, but do not wait for a lost one."""

import os
import signal
import time
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
import runs
import torch

from shared.config.options import Options
from shared.errors import UserError
from shared.optimization.optimizers import make_optimizer
from shared.processes import barrier, collectives

TIMEOUT, LATE = 4.0, 6.0  # seconds: timeout of the group, and time that one process works


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
    model = torch.nn.Linear(2, 2)
    model, _ = collectives.prepare(accelerator, model, make_optimizer(model, Options()))
    found["after"] = barrier._barriers[0].calls

    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        barrier.wait_for_all(accelerator)
    else:
        other = psutil.Process(int((folder / "pid-1").read_text()))
        try:
            barrier.wait_for_all(accelerator)
        except UserError as error:
            found["lost"] = str(error)
        other.send_signal(signal.SIGCONT)
    del model
    accelerator.free_memory()
    barrier.close()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return runs.in_group(together, 2, tmp_path_factory.mktemp("waiting"))


def test_a_process_may_be_late_by_more_than_the_timeout_of_the_group(found):
    assert [rank["main"] for rank in found] == ["late", "late"]


def test_processes_wait_for_each_other_before_each_exchange_and_before_ddp(found):
    for rank in found:
        assert rank["gathered"] == [0, 1]
        assert (rank["before"], rank["after"]) == (2, 5)


def test_a_process_without_heartbeats_is_named_and_ends_the_wait(found):
    assert found[0]["lost"].startswith("process 1 has sent no heartbeat for 4 s: ")


def test_a_single_process_does_not_wait():
    barrier.wait_for_all(SimpleNamespace(num_processes=1))  # returns, although there is no group
