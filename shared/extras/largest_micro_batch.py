"""`--auto_micro_batch`: search for the largest budget of a micro-batch that fits into memory, before training."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate.utils.memory import clear_device_cache
from torch import Tensor

from shared.config.options import TOKENS, Options
from shared.errors import UserError
from shared.monitoring.hooks import Hook
from shared.plan.batches import MicroBatch, Plan
from shared.plan.draws import Ints
from shared.run.command import ran_out

Config = TypeVar("Config", bound=Options)
SAMPLES = "per_device_train_batch_size"
BUDGETS = (TOKENS, SAMPLES)
BLOCK = 1 << 20  # samples whose lengths are read at once
KEPT_FREE = 8  # an eighth of what fits stays free: batches of varying shapes fragment the allocator's memory


class LargestMicroBatch(Hook):
    """Finds the budget, if --auto_micro_batch is given; a resumed run keeps the one that its first start found."""

    def settings(self, config: Any, stored: Mapping[str, Any] | None) -> Any:
        """The settings with the budget of the run that is resumed, or with none until one is found."""
        if not config.auto_micro_batch:
            return config
        if stored:
            return dataclasses.replace(config, **{name: stored[name] for name in BUDGETS if name in stored})
        return with_budget(config, None)

    def prepared(self, run: Any) -> None:
        """Search for the budget of a new run."""
        if run.config.auto_micro_batch and not run.resumed:
            args = run.accelerator, run.config, run.plan, run.model, run.optimizer, run.compute_loss
            run.config = apply_largest_budget(*args)


def with_budget(config: Config, budget: int | None) -> Config:
    """The config with `budget` in the field that --auto_micro_batch sets."""
    changed: dict[str, Any] = {searched_field(config): budget}
    return dataclasses.replace(config, **changed)


def longest_samples(plan: Plan, count: int) -> Ints:
    """int64 [count]: the numbers of the longest samples, longest first; their lengths are read block by block."""
    found = np.empty(0, np.int64)
    for start in range(0, plan.num_samples, BLOCK):
        found = np.concatenate([found, np.arange(start, min(start + BLOCK, plan.num_samples))])
        found = found[np.argsort(-plan.lengths_of(found), kind="stable")[:count]]
    return found


def searched_field(config: Options) -> str:
    """The name of the field that --auto_micro_batch sets."""
    return TOKENS if hasattr(config, TOKENS) else SAMPLES


def apply_largest_budget(
    accelerator: Any,
    config: Config,
    plan: Plan,
    model: torch.nn.Module,
    optimizer: Any,
    compute_loss: Callable[[MicroBatch], Tensor],
) -> Config:
    """Find the largest budget at which no process runs out of memory; set it in `plan` and in the returned config.

    A trial is a forward and backward pass over the longest samples, with gradients and optimizer state in memory. Every
    process makes the same trials. Afterwards weights, gradients, optimizer state and random state are as before. Call
    it on every process, before the first step.

    Raises:
        UserError: the longest sample alone does not fit.
    """
    most = min(plan.global_batch_size, plan.num_samples, plan.max_samples or plan.global_batch_size)
    longest = longest_samples(plan, most)
    length = int(plan.lengths_of(longest[:1])[0])

    def succeeds_on_all(act: Callable[[], object]) -> bool:
        if not (success := succeeds(act)):
            clear_device_cache(garbage_collection=True)
        mine = torch.tensor(float(success), device=accelerator.device)
        return bool(accelerator.reduce(mine, reduction="sum") == accelerator.num_processes)

    def fits(rows: int) -> bool:
        micro_batch = MicroBatch(0, 0, longest[:rows], np.zeros(rows, np.int64), rows, step_samples=rows)
        with accelerator.no_sync(model):
            return succeeds_on_all(lambda: compute_loss(micro_batch).backward())

    # Layers that compile for each number of rows (images) run eagerly in the trials, which takes more memory.
    stance = torch.compiler.set_stance("force_eager" if searched_field(config) == SAMPLES else "default")
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with left_as_before(model, optimizer), stance, torch.random.fork_rng(devices=devices):
        # Allocate gradients, then optimizer state; the inner optimizer, because Accelerate's loss scaler counts steps.
        rows = largest(most, fits) if fits(1) and succeeds_on_all(optimizer.optimizer.step) else 0
    clear_device_cache(garbage_collection=True)
    if not rows:
        raise UserError(
            f"--auto_micro_batch: the longest sample, of length {length}, does not fit into memory: shorten the "
            "samples, or add --gradient_checkpointing"
        )
    kept = rows if rows == most else max(1, rows - -(-rows // KEPT_FREE))
    name = searched_field(config)
    budget = kept * length if name == TOKENS else kept
    found = f"{rows} of the longest samples fit" + (", one more does not" if rows < most else ", the most possible")
    accelerator.print(f"--auto_micro_batch: {found}: --{name} {budget}")
    setattr(plan, "max_tokens" if name == TOKENS else "max_samples", budget)
    return with_budget(config, budget)


@contextmanager
def left_as_before(model: torch.nn.Module, optimizer: Any) -> Iterator[None]:
    """Afterwards the model has the weights and buffers from before, no gradients, and the optimizer has no state."""
    before = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in (*model.parameters(), *model.buffers())]
    yield
    optimizer.optimizer.state.clear()
    model.zero_grad()
    with torch.no_grad():
        for tensor, value in before:
            tensor.copy_(value)


def succeeds(act: Callable[[], object]) -> bool:
    """Whether `act` completes without running out of memory."""
    try:
        act()
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
        return False  # this also frees the error, whose traceback keeps tensors alive
    return True


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits, by doubling, then bisection; 1 fits, and so does less than it."""
    low, high = 1, most + 1
    while low < most and high > most:
        tried = min(2 * low, most)
        low, high = (tried, high) if fits(tried) else (low, tried)
    while high - low > 1 and low < most:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
