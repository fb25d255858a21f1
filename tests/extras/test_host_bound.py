"""A GPU that mostly waits for the host: from its events to the line at the end of the run."""

import pytest
import torch
from monitored_steps import WENT_WELL, monitor, plan

from shared.extras import costs as extras_costs
from shared.extras.costs import Stopwatch
from shared.extras.time_report import breakdown
from shared.monitoring.monitor import Monitor

HOST = 1.0  # seconds that the host takes for each part of a step


@pytest.fixture
def gpu(clock, monkeypatch):
    """Replace CUDA's events by those of a GPU that needs `gpu[0]` seconds for what the host gives it in a part."""
    seconds, done, told = [0.0], [0.0], [clock[0]]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            given = clock[0] > told[0]  # else the host had no time to give it anything
            self.at = done[0] = max(done[0], clock[0]) + given * seconds[0]
            told[0] = clock[0]

        def synchronize(self):
            clock[0] = max(clock[0], self.at)

        def elapsed_time(self, later):
            return (later.at - self.at) * 1000

    sum_up = Monitor._sum_up

    def wait_and_sum_up(watch):  # on a GPU the host reads the losses here
        told[0] = clock[0] = max(clock[0], done[0])
        sum_up(watch)

    monkeypatch.setattr(Monitor, "_sum_up", wait_and_sum_up)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(extras_costs, "Stopwatch", lambda _: Stopwatch(torch.device("cuda")))
    return seconds


@pytest.mark.parametrize(("work", "share"), [(0.0001, 100), (0.9, 0), (1.5, 0)])
def test_a_run_tells_whether_its_gpu_waited_for_the_host(accelerator, clock, gpu, work, share):
    model = torch.nn.Linear(1, 1)
    watch = monitor(accelerator, None, model=model)
    gpu[0] = work
    lines = []
    for step in range(4):
        (piece,) = plan().micro_batches(step)
        model(torch.zeros(len(piece.samples), 1))
        clock[0] += HOST
        watch.add(piece, torch.tensor(0.0))
        clock[0] += HOST
        watch.end_step(WENT_WELL)
        lines.append({"step": step + 1, **watch.read()})
    assert f"host-bound {share} %" in breakdown(lines)
