"""Operations that all processes of a run call together: gather values, share an error, run on the main process."""

from collections.abc import Callable
from typing import Any

import torch

from shared.errors import UserError
from shared.processes import barrier


def prepare(accelerator: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """Call `accelerator.prepare` once all processes are ready for it; each machine prepares its data by itself.

    Under FSDP the model is sharded already (shared/models/sharding.py). Then Accelerate only adds autocast.
    """
    barrier.wait_for_all(accelerator)
    if accelerator.is_fsdp2:
        return accelerator.prepare_model(model, evaluation_mode=True), accelerator.prepare_optimizer(optimizer)
    return accelerator.prepare(model, optimizer)


def gather(accelerator: Any, value: Any) -> list[Any]:
    """Return the `value` of every process, by rank. Every process must call this; it waits for slow ones."""
    values: list[Any] = [value]
    if accelerator.num_processes > 1:
        barrier.wait_for_all(accelerator)
        values = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(values, value)
    return values


def agree(accelerator: Any, error: UserError | None) -> None:
    """Raise the error of the lowest rank that has one, on every process. Every process must call this.

    Raises:
        UserError: at least one process passed an `error`.
    """
    messages = gather(accelerator, str(error) if error else None)
    if message := next(filter(None, messages), None):
        raise UserError(message)


def on_main_process(accelerator: Any, function: Callable[[], Any]) -> Any:
    """Call `function` on the main process only; return its result, or raise its UserError, on every process."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except UserError as error:
            outcome[1] = str(error)
    if accelerator.num_processes > 1:
        barrier.wait_for_all(accelerator)
        torch.distributed.broadcast_object_list(outcome)
    if outcome[1]:
        raise UserError(outcome[1])
    return outcome[0]
