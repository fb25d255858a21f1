"""Feed the steps of a run to a Monitor, for tests."""

from types import SimpleNamespace

import numpy as np
import torch

from shared.extras.costs import Costs
from shared.extras.flops import Mfu
from shared.monitoring.monitor import Monitor
from shared.options.data_options import ExtraOptions
from shared.plan.batches import Plan

LENGTHS = np.random.default_rng(0).integers(1, 50, 40)
WENT_WELL, SKIPPED = torch.tensor(0.0), torch.tensor(1.0)


def monitor(accelerator, lengths=LENGTHS, waited=lambda: 0.0, state=None, model=None):
    """The monitor of a run that measures its MFU; the device makes 1e12 operations per second."""
    run = SimpleNamespace(accelerator=accelerator, config=ExtraOptions(peak_tflops=1.0), lengths=lengths)
    run.model, run.plan, mfu = model or torch.nn.Linear(1, 1), plan(), Mfu()
    run.compute_loss = lambda _: run.model(torch.ones(2, next(run.model.parameters()).shape[-1]))
    mfu.prepared(run)
    run.loader, costs = Waiting(waited), Costs()
    costs.begun(run)
    run.monitor = Monitor(accelerator, lengths, state or {}, [mfu, costs])
    return run.monitor


class Waiting:
    """A loader that has waited as long as `seconds` says."""

    def __init__(self, seconds):
        self.seconds = seconds

    @property
    def seconds_waited(self):
        return self.seconds()


def plan(**values):
    return Plan(**{"lengths": LENGTHS, "seed": 3, "global_batch_size": 12, "max_steps": 10} | values)


def run_step(watch, pieces, loss=1.0, skipped=WENT_WELL):
    """Feed the micro-batches of a step whose mean loss is `loss`."""
    for piece in pieces:
        watch.add(piece, torch.tensor(loss * piece.counted * len(piece.samples) / piece.step_size))
    watch.end_step(skipped)


class Slow(torch.nn.Module):
    """A model of one layer whose forward pass takes a second of the test's clock."""

    def __init__(self, clock):
        super().__init__()
        self.layer, self.clock = torch.nn.Linear(3, 5), clock

    def forward(self, ids):
        self.clock[0] += 1
        return self.layer(torch.ones(*ids.shape, 3))


def timed_steps(accelerator, clock, steps=2):
    """Steps of two micro-batches: 1 s of waiting and 2 s of computing for each, 0.5 s for the update."""
    waited, model = [0.0], Slow(clock)
    watch = monitor(accelerator, waited=lambda: waited[0], model=model)
    for step in range(steps):
        for piece in plan(micro_batches_per_step=2).micro_batches(step):
            clock[0] += 1
            waited[0] += 1
            out = model(torch.zeros(len(piece.samples), int(LENGTHS[piece.samples].max()), dtype=torch.long))
            clock[0] += 1
            watch.add(piece, out.sum() * 0)
        clock[0] += 0.5
        watch.end_step(WENT_WELL)
    return watch


def rows(**values):
    """The figures of three processes, which are equal except for those given in `values`."""
    names = ["data_wait", "forward_backward", "communication", "optimizer", "evaluation", "checkpoint", "flops"]
    names += ["tokens", "positions", "seconds", "peak_flops", "peak_memory", "reserved_memory"]
    same = {name: np.ones(3) for name in names}
    return same | {name: np.array(three) for name, three in values.items()}
