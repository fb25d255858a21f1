"""Private and undocumented attributes of Accelerate: prepared objects, the process state, handlers."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from shared.compat.missing import missing


def models(accelerator: Any) -> list[nn.Module]:
    """`Accelerator._models`: the prepared models. This is the list itself, which `prepare` extends."""
    return _attribute(accelerator, "_models", "a checkpoint")


def optimizers(accelerator: Any) -> list[Any]:
    """`Accelerator._optimizers`: the wrapped, prepared optimizers. This is the list itself."""
    return _attribute(accelerator, "_optimizers", "a checkpoint")


def registered_objects(accelerator: Any) -> list[Any]:
    """`Accelerator._custom_objects`: the objects of `register_for_checkpointing`. This is the list itself."""
    return _attribute(accelerator, "_custom_objects", "a checkpoint")


def schedulers_and_loaders(accelerator: Any) -> list[Any]:
    """`Accelerator._schedulers` and `_dataloaders`: the prepared schedulers and data loaders."""
    return [
        *_attribute(accelerator, "_schedulers", "a checkpoint"),
        *_attribute(accelerator, "_dataloaders", "a checkpoint"),
    ]


def set_ddp_handler(accelerator: Any, handler: Any) -> None:
    """`Accelerator.ddp_handler`, undocumented: set the keyword arguments and the hook that `prepare` passes to DDP.

    The documented way, `kwargs_handlers`, accepts only Accelerate's own class, which does not support custom hooks.
    """
    _attribute(accelerator, "ddp_handler", "DDP")
    accelerator.ddp_handler = handler


def fsdp_settings(accelerator: Any) -> Any:
    """`AcceleratorState.fsdp_plugin`, undocumented: what the launcher's `fsdp_config` asks for."""
    return _attribute(accelerator.state, "fsdp_plugin", "FSDP")


def use_fsdp_on_cpu(accelerator: Any) -> None:
    """`distributed_type` and `fsdp_plugin` of Accelerate's states: what it sets for FSDP itself, but only on GPUs.

    On a CPU it drops FSDP without a word and would wrap the model by DDP.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()  # reads the launcher's environment variables
    for state in (PartialState(), accelerator.state):  # each new AcceleratorState copies the former
        _attribute(state, "distributed_type", "FSDP")
        state.distributed_type = DistributedType.FSDP


def set_trackers(accelerator: Any, trackers: Sequence[Any]) -> None:
    """`Accelerator.log_with`, undocumented after construction: set the trackers that `init_trackers` will start."""
    _attribute(accelerator, "log_with", "--report_to")
    accelerator.log_with = list(trackers)


def has_state() -> bool:
    """`accelerate.state.is_initialized`: whether an Accelerator was made in this process."""
    from accelerate.state import is_initialized

    return is_initialized()


def mark_state(name: str) -> None:
    """Mark `AcceleratorState._shared_state` with a name of ours. `reset_state` removes the mark."""
    from accelerate.state import AcceleratorState

    _attribute(AcceleratorState, "_shared_state", "a run")[name] = True


def state_is_marked(name: str) -> bool:
    """Whether `mark_state` has marked the current state with this name."""
    from accelerate.state import AcceleratorState

    return name in _attribute(AcceleratorState, "_shared_state", "a run")


def start_failed() -> bool:
    """`PartialState._shared_state`: whether its construction failed before the number of processes was known."""
    from accelerate.state import PartialState

    state = _attribute(PartialState, "_shared_state", "a run")
    return bool(state) and "num_processes" not in state


def reset_state(processes: bool) -> None:
    """`_reset_state` of Accelerate's states: drop them; with `processes`, also the state of the processes."""
    from accelerate.state import AcceleratorState, GradientState

    _attribute(AcceleratorState, "_reset_state", "a second run in a process")(reset_partial_state=processes)
    _attribute(GradientState, "_reset_state", "a second run in a process")()


def _attribute(owner: Any, name: str, use: str) -> Any:
    """Return an attribute of Accelerate; `use` names its use for the error.

    Raises:
        UserError: this version of Accelerate does not have it.
    """
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type) else type(owner)
        raise missing("accelerate", f"{kind.__name__}.{name}", use)
    return getattr(owner, name)
