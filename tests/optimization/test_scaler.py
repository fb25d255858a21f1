"""The fp16 path with its gradient scaler, on a CPU: one overflow, on one of two processes, skips one update on both.

Accelerate makes no scaler on a CPU, so the test gives it a `torch.amp.GradScaler("cpu")`. Everything else is the same
as on a GPU, except that the forward pass is in float32. `make gpu` tests fp16 itself.
"""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import runs
import torch
from torch import nn

from shared.checkpoints.folders import path_of
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.config.options import Options
from shared.monitoring.monitor import Monitor
from shared.optimization import gradients
from shared.optimization.optimizers import make_optimizer, make_schedule, set_learning_rate, step_if_finite
from shared.plan.batches import Plan

STEPS, OVERFLOW_AT, SAVED_AFTER = 8, 1, 4  # the checkpoint is after the overflow and before the scale grows again
SCALE, GROWS_EVERY = 2.0**12, 3
CONFIG = Options(learning_rate=0.05, max_grad_norm=0.5, warmup_steps=2, global_batch_size=10)
PLAN = {"num_samples": 37, "seed": 1, "global_batch_size": 10, "max_steps": STEPS}
TARGETS = torch.linspace(-1, 1, 37)


def give_scaler(accelerator):
    """What `Accelerator(mixed_precision="fp16")` sets up on a GPU."""
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=GROWS_EVERY)
    accelerator.state._mixed_precision = "fp16"
    assert accelerator.mixed_precision == "fp16"


def train(accelerator, optim, save=None, load=None):
    """Run a recipe's loop on a tiny model, from the start or the checkpoint `load`; return the figures of each step."""
    accelerator.free_memory()
    accelerator.native_amp = False
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(model, make_optimizer(model, Options(optim=optim)))
    # After `prepare`, so that the forward pass stays in float32 and the numbers are exactly those without a scaler.
    accelerator.native_amp = accelerator.scaler is not None
    parameters = list(model.parameters())
    plan = Plan(**PLAN, num_processes=accelerator.num_processes, process_index=accelerator.process_index)
    inputs = torch.sin(torch.arange(37 * 6.0)).reshape(37, 6)
    schedule = make_schedule(CONFIG, STEPS)
    monitor = Monitor(accelerator, None, {})
    first = 0
    if load:
        Saver(accelerator, CONFIG, plan).load(path_of(load, SAVED_AFTER))
        first = SAVED_AFTER
    figures = []
    for step in range(first, STEPS):
        set_learning_rate(optimizer, schedule(step))
        (micro_batch,) = plan.micro_batches(step)
        rows = torch.as_tensor(micro_batch.samples)
        loss = ((model(inputs[rows]).squeeze(1) - TARGETS[rows]) ** 2).sum() / micro_batch.step_size
        bad = step == OVERFLOW_AT and accelerator.process_index == 1
        # 1e38 is finite until the scaler multiplies it; without a scaler the loss itself has to overflow.
        factor = 1.0 if not bad else 1e38 if accelerator.scaler else math.inf
        gradients.backward(accelerator, loss * factor)
        grad_norm = gradients.clip(accelerator, parameters, CONFIG.max_grad_norm)
        skipped = step_if_finite(accelerator, optimizer, grad_norm)
        monitor.end_step(skipped)
        gradients.set_to_none(parameters)
        scale = accelerator.scaler.get_scale() if accelerator.scaler else None
        figures.append({"grad_norm": str(float(grad_norm)), "skipped": float(skipped), "scale": scale})
        if save and step + 1 == SAVED_AFTER:
            Path(save).mkdir(exist_ok=True)
            saver = Saver(accelerator, replace(CONFIG, output_dir=save), plan)
            saver.save(Progress(step=SAVED_AFTER), monitor.state())
            saver.finish()
    return {
        "steps": figures,
        "skipped_updates": monitor.read()["skipped_updates"],
        "weights": torch.cat([p.detach().flatten() for p in parameters]).tolist(),
    }


def train_all(accelerator, folder):
    """Every variant, in one group of processes."""
    results = {}
    for optim in ("adamw", "sgd"):
        accelerator.scaler, accelerator.state._mixed_precision = None, "no"
        results[f"{optim}-plain"] = train(accelerator, optim)
        give_scaler(accelerator)
        results[f"{optim}-scaled"] = train(accelerator, optim, save=str(folder / optim))
        give_scaler(accelerator)  # a new one, as in a new process
        results[f"{optim}-resumed"] = train(accelerator, optim, load=str(folder / optim))
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """For each of two processes, {variant: the result of `train`}."""
    return runs.in_group(train_all, 2, tmp_path_factory.mktemp("scaler"))


OPTIMIZERS = pytest.mark.parametrize("optim", ["adamw", "sgd"])
VARIANTS = pytest.mark.parametrize("variant", ["plain", "scaled"])


@OPTIMIZERS
@VARIANTS
def test_an_overflow_on_one_process_skips_exactly_that_update_on_both(results, optim, variant):
    for rank in (0, 1):
        steps = results[rank][f"{optim}-{variant}"]["steps"]
        assert [step["skipped"] for step in steps] == [float(i == OVERFLOW_AT) for i in range(STEPS)]
        assert not math.isfinite(float(steps[OVERFLOW_AT]["grad_norm"]))
        # Both processes skip it, and the run counts it once.
        assert results[rank][f"{optim}-{variant}"]["skipped_updates"] == 1
    assert results[0][f"{optim}-{variant}"]["weights"] == results[1][f"{optim}-{variant}"]["weights"]


@OPTIMIZERS
def test_the_scale_halves_at_the_overflow_and_grows_again(results, optim):
    for rank in (0, 1):
        scales = [step["scale"] for step in results[rank][f"{optim}-scaled"]["steps"]]
        assert scales == [SCALE, *[SCALE / 2] * 3, *[SCALE] * 3, 2 * SCALE]


@OPTIMIZERS
def test_clipping_sees_unscaled_gradients(results, optim):
    """Scales are powers of two: dividing by one is exact, so the norms and weights are those without a scaler."""
    plain, scaled = (results[0][f"{optim}-{variant}"] for variant in ("plain", "scaled"))
    good = [i for i in range(STEPS) if i != OVERFLOW_AT]
    norms = [float(plain["steps"][i]["grad_norm"]) for i in good]
    assert [float(scaled["steps"][i]["grad_norm"]) for i in good] == norms
    assert max(norms) > CONFIG.max_grad_norm, "nothing was clipped"
    assert scaled["weights"] == plain["weights"]


@OPTIMIZERS
def test_the_scale_is_in_the_checkpoint_and_a_resumed_run_continues_it(results, optim):
    for rank in (0, 1):
        whole, resumed = results[rank][f"{optim}-scaled"], results[rank][f"{optim}-resumed"]
        assert whole["steps"][SAVED_AFTER - 1]["scale"] != SCALE, "a new scaler would go unnoticed"
        assert resumed["steps"] == whole["steps"][SAVED_AFTER:]
        assert resumed["weights"] == whole["weights"]
