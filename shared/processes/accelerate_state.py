"""Accelerate keeps global state. This module resets it for each run, because a notebook starts several runs."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from shared.compat import of_accelerate
from shared.errors import UserError

OURS = "of_a_recipe"
_pids_with_runs: set[int] = set()  # this process and its ancestors by fork, if they have started a run


def new_accelerator(make: Callable[[], Any]) -> Any:
    """Return `make()`, an Accelerator without settings of an earlier run in this process, such as its precision.

    Raises:
        UserError: other code in this process has already made an Accelerator with other settings; or this process was
            forked from one that had started a run.
    """
    if _pids_with_runs - {os.getpid()}:
        raise UserError(
            "notebook_launcher must come first: this notebook has started a run in its own process, and processes "
            "forked from it cannot use CUDA and may hang; restart the kernel and launch first"
        )
    reset()
    is_new = not of_accelerate.has_state()
    was_set = "LOCAL_WORLD_SIZE" in os.environ
    try:
        accelerator = make()
    except ValueError as error:
        if "already been initialized" not in str(error):
            raise
        raise UserError(
            "an Accelerator that other code made in this process has other settings than this run "
            f"(--mixed_precision, or the device): restart the process, or the notebook's kernel ({error})"
        ) from None
    finally:
        if not was_set:
            os.environ.pop("LOCAL_WORLD_SIZE", None)  # a guess of Accelerate
    if is_new:
        of_accelerate.mark_state(OURS)
    _pids_with_runs.add(os.getpid())
    return accelerator


def reset() -> None:
    """Clear Accelerate's state after a run or a failed start; keep the process group."""
    if "accelerate.state" not in sys.modules:
        return
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if of_accelerate.state_is_marked(OURS) or of_accelerate.start_failed():
        of_accelerate.reset_state(processes=not has_group)
