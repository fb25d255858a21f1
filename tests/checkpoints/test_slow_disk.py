"""If saves are due faster than the disk writes them, the run prints one warning with an interval that fits."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from shared.checkpoints import saving
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.config.options import Options
from shared.optimization.optimizers import make_optimizer
from shared.plan.batches import Plan

PLAN = Plan(num_samples=40, seed=0, global_batch_size=2, num_epochs=1)  # 20 steps


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that makes steps of one second by a simulated clock; its disk takes `seconds` for a checkpoint."""
    now = SimpleNamespace(seconds=0.0, written=0.0)
    monkeypatch.setattr(saving.time, "perf_counter", lambda: now.seconds)
    accelerator = Accelerator(cpu=True)
    (tmp_path / "out").mkdir()

    def steps(last, every, seconds, extra=()):
        config = Options(output_dir=str(tmp_path / "out"), checkpointing_steps=every)
        model = nn.Linear(3, 2)
        model, optimizer = accelerator.prepare(model, make_optimizer(model, config))
        saver, progress = Saver(accelerator, config, PLAN), Progress()
        look = saver._look

        def wait_for_disk(wait=False, last=False):
            if wait and saver.job:
                now.seconds = max(now.seconds, now.written)
            look(wait, last)

        monkeypatch.setattr(saver, "_look", wait_for_disk)
        for step in range(1, last + 1):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            now.seconds += 1
            progress.step = step
            if saver.is_due(progress) or step in extra:
                saver.save(progress, {})
                now.written = now.seconds + seconds
        saver.finish()
        accelerator.free_memory()

    return steps


def test_a_slow_disk_causes_one_warning_with_an_interval_that_fits(run, capfd):
    run(last=16, every="2", seconds=6)
    assert capfd.readouterr().err == (
        "warning: checkpoints are due faster than they are written: one every 2.0 s, and writing takes 6.0 s. The "
        "training has waited 12 s for that; --checkpointing_steps 7 would not wait\n"
    )
    run(last=19, every="7", seconds=6)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "values",
    [
        {"last": 18, "every": "2", "seconds": 1.9},
        {"last": 4, "every": "2", "seconds": 10},  # only one short wait
        {"last": 12, "every": "8", "seconds": 60, "extra": (9,)},  # a save after a signal
        {"last": 20, "every": "19", "seconds": 60},  # the last save of the run
        {"last": 12, "every": "no", "seconds": 60, "extra": (9, 10)},
    ],
)
def test_a_fast_disk_and_saves_that_no_interval_asks_for_cause_no_warning(run, capfd, values):
    run(**values)
    assert capfd.readouterr().err == ""
