"""Processes wait for one that is late for longer than the group's time-out, and do not wait for one that is lost."""

import os
import signal
import time
from types import SimpleNamespace

import psutil
import pytest
import runs
import torch

from shared import launch, machines, waiting
from shared.errors import UserError
from shared.optimization import make_optimizer
from shared.options import Options

TIMEOUT = 2  # seconds of the group
LATE = 3.5


def together(accelerator, folder):
    """What two processes say when one is late, and when one has stopped."""
    rank, found = accelerator.process_index, {}
    waiting.SIGN_EVERY, waiting.SILENT = 0.2, 1.0
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    waiting.for_all(accelerator)  # the first time, at the start of a run, nobody is late
    found["main"] = launch.on_main_process(accelerator, lambda: time.sleep(LATE) or "late")
    if rank == 1:
        time.sleep(LATE)
    found["gathered"] = machines.gather(accelerator, rank)
    if rank == 0:
        time.sleep(LATE)
    model = torch.nn.Linear(2, 2)
    model, _ = launch.prepare(accelerator, model, make_optimizer(model, Options()))
    found["prepared"] = type(model).__name__
    if rank == 1:
        time.sleep(LATE)
    try:
        launch.agree(accelerator, UserError("found late") if rank == 1 else None)
    except UserError as error:
        found["agreed"] = str(error)

    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        waiting.for_all(accelerator)
    else:
        other = psutil.Process(int((folder / "pid-1").read_text()))
        try:
            waiting.for_all(accelerator)
        except UserError as error:
            found["lost"] = str(error)
        other.send_signal(signal.SIGCONT)
    del model
    accelerator.free_memory()
    waiting.close()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return runs.in_group(together, 2, tmp_path_factory.mktemp("waiting"), seconds=TIMEOUT)


def test_a_process_may_be_late_for_longer_than_the_time_out_of_the_group(found):
    for rank in found:
        assert rank["main"] == "late"
        assert rank["gathered"] == [0, 1]
        assert rank["prepared"] == "DistributedDataParallel"
        assert rank["agreed"] == "found late"


def test_a_process_without_a_sign_of_life_is_named_and_not_waited_for(found):
    assert found[0]["lost"].startswith("process 1 has given no sign of life for 1 s: ")


def test_one_process_waits_for_nobody():
    waiting.for_all(SimpleNamespace(num_processes=1))  # there is no group to ask
