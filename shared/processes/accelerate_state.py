"""Accelerate keeps its state in the process; here each run begins with a new one, as notebooks start several."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from shared.compat import of_accelerate
from shared.errors import UserError

OURS = "of_a_recipe"
_ran_in: set[int] = set()  # ids of the processes, this one or those that it was forked from, that have begun a run


def new_accelerator(make: Callable[[], Any]) -> Any:
    """The Accelerator that `make` makes, with nothing of an earlier run: its precision, say.

    Raises:
        UserError: something else than a recipe has made one in this process, which stands in the way; or this process
            was forked from one that had begun a run.
    """
    if _ran_in - {os.getpid()}:
        raise UserError(
            "notebook_launcher has to come first: this notebook has begun a run in its own process, and processes that "
            "are forked from it cannot use CUDA and may hang; restart the kernel and launch first"
        )
    forget()
    is_new = not of_accelerate.has_state()
    counted = "LOCAL_WORLD_SIZE" in os.environ
    try:
        accelerator = make()
    except ValueError as error:
        if "already been initialized" not in str(error):
            raise
        raise UserError(
            "an Accelerator that something else made in this process has other settings than this run "
            f"(--mixed_precision, or the device): restart the process, the kernel of a notebook ({error})"
        ) from None
    finally:
        if not counted:
            os.environ.pop("LOCAL_WORLD_SIZE", None)  # Accelerate's guess
    if is_new:
        of_accelerate.mark_state(OURS)
    _ran_in.add(os.getpid())
    return accelerator


def forget() -> None:
    """Drop the state that an earlier run has left, and that of a start that failed; the group of processes stays."""
    if "accelerate.state" not in sys.modules:
        return
    has_group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if of_accelerate.state_is_marked(OURS) or of_accelerate.start_failed():
        of_accelerate.reset_state(processes=not has_group)
