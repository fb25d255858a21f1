"""What all processes of a run do together: gather values, agree on an error, let the main process act."""

from collections.abc import Callable
from typing import Any

import torch

from shared.errors import UserError
from shared.processes import patience


def prepare(accelerator: Any, model: Any, optimizer: Any) -> tuple[Any, Any]:
    """`accelerator.prepare`, once all processes have come to it: machines prepare their data on their own.

    Under FSDP the model is sharded already (shared/models/sharding.py). Then Accelerate only adds autocast.
    """
    patience.for_all(accelerator)
    if accelerator.is_fsdp2:
        return accelerator.prepare_model(model, evaluation_mode=True), accelerator.prepare_optimizer(optimizer)
    return accelerator.prepare(model, optimizer)


def gather(accelerator: Any, value: Any) -> list[Any]:
    """What each process has as `value`, by rank; call it on every process, however late."""
    values: list[Any] = [value]
    if accelerator.num_processes > 1:
        patience.for_all(accelerator)
        values = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(values, value)
    return values


def agree(accelerator: Any, error: UserError | None) -> None:
    """Raise on every process the error that some process met, that of the lowest rank; call it on all of them.

    Raises:
        UserError: if any process brought one.
    """
    messages = gather(accelerator, str(error) if error else None)
    if message := next(filter(None, messages), None):
        raise UserError(message)


def on_main_process(accelerator: Any, function: Callable[[], Any]) -> Any:
    """Call `function` on the main process only; every process gets its result, or its UserError, however late."""
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            outcome[0] = function()
        except UserError as error:
            outcome[1] = str(error)
    if accelerator.num_processes > 1:
        patience.for_all(accelerator)
        torch.distributed.broadcast_object_list(outcome)
    if outcome[1]:
        raise UserError(outcome[1])
    return outcome[0]
