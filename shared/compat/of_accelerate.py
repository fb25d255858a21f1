"""Private and undocumented attributes of Accelerate: prepared objects and the process state."""

from typing import Any

from accelerate.state import AcceleratorState, GradientState
from torch import nn

from shared.errors import UserError, count_of


def prepared(accelerator: Any) -> tuple[nn.Module, Any, list[Any]]:
    """`Accelerator._models`, `_optimizers`, `_custom_objects`: model, wrapped optimizer, and registered objects.

    Accelerate keeps the model that it has not yet wrapped in DDP, so no name of a weight begins with "module.".

    The last one is the list itself, which `register_for_checkpointing` extends. Schedulers and loaders are functions of
    the config and the step: Accelerate must not have prepared any (`_schedulers`, `_dataloaders`).

    Raises:
        UserError: not exactly one model and one optimizer are prepared.
    """
    assert not accelerator._schedulers
    assert not accelerator._dataloaders
    models, optimizers = accelerator._models, accelerator._optimizers
    if (len(models), len(optimizers)) != (1, 1):
        found = f"{count_of(len(models), 'model')} and {count_of(len(optimizers), 'optimizer')}"
        raise UserError(
            f"{found} are prepared, but a run has one of each: make one module of several models, and one "
            "ChainedOptimizers (shared/models/optimizers.py) of several optimizers"
        )
    return models[0], optimizers[0], accelerator._custom_objects


def reset_state(processes: bool) -> None:
    """`_reset_state` of Accelerate's states: drop them; with `processes`, also the state of the processes."""
    AcceleratorState._reset_state(reset_partial_state=processes)
    GradientState._reset_state()
