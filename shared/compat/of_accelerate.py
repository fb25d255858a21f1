"""Private and undocumented attributes of Accelerate: prepared objects, the process state, handlers."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from shared.compat import attribute


def models(accelerator: Any) -> list[nn.Module]:
    """`Accelerator._models`: the prepared models. This is the list itself, which `prepare` extends."""
    return attribute(accelerator, "_models", "a checkpoint")


def optimizers(accelerator: Any) -> list[Any]:
    """`Accelerator._optimizers`: the wrapped, prepared optimizers. This is the list itself."""
    return attribute(accelerator, "_optimizers", "a checkpoint")


def registered_objects(accelerator: Any) -> list[Any]:
    """`Accelerator._custom_objects`: the objects of `register_for_checkpointing`. This is the list itself."""
    return attribute(accelerator, "_custom_objects", "a checkpoint")


def schedulers_and_loaders(accelerator: Any) -> list[Any]:
    """`Accelerator._schedulers` and `_dataloaders`: the prepared schedulers and data loaders."""
    return [
        *attribute(accelerator, "_schedulers", "a checkpoint"),
        *attribute(accelerator, "_dataloaders", "a checkpoint"),
    ]


def set_ddp_handler(accelerator: Any, handler: Any) -> None:
    """`Accelerator.ddp_handler`, undocumented: set the keyword arguments and the hook that `prepare` passes to DDP.

    The documented way, `kwargs_handlers`, accepts only Accelerate's own class, which does not support custom hooks.
    """
    attribute(accelerator, "ddp_handler", "DDP")
    accelerator.ddp_handler = handler


def set_trackers(accelerator: Any, trackers: Sequence[Any]) -> None:
    """`Accelerator.log_with`, undocumented after construction: set the trackers that `init_trackers` will start."""
    attribute(accelerator, "log_with", "--report_to")
    accelerator.log_with = list(trackers)


def has_state() -> bool:
    """`accelerate.state.is_initialized`: whether an Accelerator was made in this process."""
    from accelerate.state import is_initialized

    return is_initialized()


def mark_state(name: str) -> None:
    """Mark `AcceleratorState._shared_state` with a name of ours. `reset_state` removes the mark."""
    from accelerate.state import AcceleratorState

    attribute(AcceleratorState, "_shared_state", "a run")[name] = True


def state_is_marked(name: str) -> bool:
    """Whether `mark_state` has marked the current state with this name."""
    from accelerate.state import AcceleratorState

    return name in attribute(AcceleratorState, "_shared_state", "a run")


def start_failed() -> bool:
    """`PartialState._shared_state`: whether its construction failed before the number of processes was known."""
    from accelerate.state import PartialState

    state = attribute(PartialState, "_shared_state", "a run")
    return bool(state) and "num_processes" not in state


def reset_state(processes: bool) -> None:
    """`_reset_state` of Accelerate's states: drop them; with `processes`, also the state of the processes."""
    from accelerate.state import AcceleratorState, GradientState

    attribute(AcceleratorState, "_reset_state", "a second run in a process")(reset_partial_state=processes)
    attribute(GradientState, "_reset_state", "a second run in a process")()
