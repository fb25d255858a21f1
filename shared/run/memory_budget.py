"""Out of memory: said in one line, and prevented by --auto_micro_batch, which tries budgets before training."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor

from shared.config import options
from shared.errors import UserError
from shared.plan.batches import MicroBatch, Plan
from shared.plan.loading import fed

Config = TypeVar("Config", bound=options.Options)
TOKENS, SAMPLES = "max_tokens_per_micro_batch", "per_device_train_batch_size"
KEPT_FREE = 8  # an eighth of what fits: the allocator loses some of it to batches of varying shapes


def ran_out(error: BaseException) -> bool:
    """Whether an error says that the memory of a device, or of the host, did not suffice."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, Exception) and should_reduce_batch_size(error)
    )


def advice(config: options.Options) -> str:
    """One line for a run that has run out of memory: the micro-batch and the flags to lower."""
    limits = [f"--{name} {value}" for name in (TOKENS, SAMPLES) if (value := getattr(config, name, None))]
    fix = f"lower {' or '.join(limits)}" if limits else f"set --{SAMPLES}"
    where = f"on a micro-batch of {fed.shape}" if fed.shape else "before the first micro-batch"
    return (
        f"process {os.environ.get('RANK', 0)} ran out of memory {where}: {fix}, in another --output_dir if this "
        "run has a checkpoint, whose budget it keeps"
    )


def resolve(config: Config, stored: Any) -> Config:
    """The budget of a run with --auto_micro_batch: that of the run that goes on, or none, until it has been found."""
    if not config.auto_micro_batch:
        return config
    if stored:
        kept = {name: stored[name] for name in (TOKENS, SAMPLES) if name in stored}
        return dataclasses.replace(config, **kept)
    return with_budget(config, None)


def with_budget(config: Config, budget: int | None) -> Config:
    """The config with another budget in the field that --auto_micro_batch sets."""
    changed: dict[str, Any] = {searched(config): budget}
    return dataclasses.replace(config, **changed)


def searched(config: options.Options) -> str:
    """Which field --auto_micro_batch sets."""
    return TOKENS if hasattr(config, TOKENS) else SAMPLES


def apply_largest_budget(
    accelerator: Any,
    config: Config,
    plan: Plan,
    model: torch.nn.Module,
    optimizer: Any,
    compute_loss: Callable[[MicroBatch], Tensor],
) -> Config:
    """Set the largest budget with which no process runs out of memory, in `plan` and in the config that is returned.

    The trials are forward and backward passes over the longest samples, beside gradients and optimizer state. Every
    process makes the same ones, and what is too much for one is too much for all. Weights, gradients, optimizer and
    random state are as before. Call it on every process, before the first step.

    Raises:
        UserError: not even one sample fits.
    """
    longest = np.argsort(-plan.lengths, kind="stable")
    length = int(plan.lengths[longest[0]])
    most = min(plan.global_batch_size, plan.num_samples, plan.max_samples or plan.global_batch_size)

    def everywhere(act: Callable[[], object]) -> bool:
        success = succeeds(act)
        if not success:
            clear_device_cache(garbage_collection=True)
        mine = torch.tensor(float(success), device=accelerator.device)
        return bool(accelerator.reduce(mine, reduction="sum") == accelerator.num_processes)

    def fits(rows: int) -> bool:
        micro_batch = MicroBatch(0, 0, longest[:rows], np.zeros(rows, np.int64), rows)
        with accelerator.no_sync(model):
            return everywhere(lambda: compute_loss(micro_batch).backward())

    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    # Layers that compile for each number of rows (images) run eager in the trials, which takes more memory, not less.
    stance = torch.compiler.set_stance("force_eager" if searched(config) == SAMPLES else "default")
    with stance, torch.random.fork_rng(devices=[accelerator.device] if accelerator.device.type == "cuda" else []):
        # Gradients, then what the optimizer keeps; not through Accelerate, whose loss scale would count the step.
        rows = largest(most, fits) if fits(1) and everywhere(optimizer.optimizer.step) else 0
    optimizer.optimizer.state.clear()
    model.zero_grad()
    with torch.no_grad():
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)
    clear_device_cache(garbage_collection=True)
    if not rows:
        raise UserError(
            f"--auto_micro_batch: not even one sample, of length {length}, fits into memory: shorten the samples, or "
            "add --gradient_checkpointing"
        )
    kept = rows if rows == most else max(1, rows - -(-rows // KEPT_FREE))
    name = searched(config)
    budget = kept * length if name == TOKENS else kept
    found = f"{rows} of the longest samples fit" + (", one more does not" if rows < most else ", as many as can occur")
    accelerator.print(f"--auto_micro_batch: {found}: --{name} {budget}")
    if name == TOKENS:
        plan.max_tokens = budget
    else:
        plan.max_samples = budget
    return with_budget(config, budget)


def succeeds(act: Callable[[], object]) -> bool:
    """Whether there is memory for it."""
    try:
        act()
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        return False  # and with the error go the tensors that its traceback holds
    return True


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, if all smaller ones do: doubling, then halving. 1 is known to."""
    low, high = 1, most + 1
    while low < most and high > most:
        tried = min(2 * low, most)
        low, high = (tried, high) if fits(tried) else (low, tried)
    while high - low > 1 and low < most:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
