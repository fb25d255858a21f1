"""Private and undocumented attributes of Accelerate: prepared objects, the process state, FSDP on a CPU."""

from typing import Any

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
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


def use_fsdp_on_cpu(accelerator: Any) -> None:
    """`distributed_type` and `fsdp_plugin` of Accelerate's states: what it sets for FSDP itself, but only on GPUs.

    On a CPU it drops FSDP without a word and would wrap the model by DDP. `cpu_offload` is off: a CPU is the host.
    """
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(cpu_offload=False)  # reads the launcher's variables
    for state in (PartialState(), accelerator.state):  # each new AcceleratorState copies the former
        state.distributed_type = DistributedType.FSDP
