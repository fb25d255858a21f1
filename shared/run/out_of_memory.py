"""Out of memory: recognizing it, and the one-line error."""

import os

import torch
from accelerate.utils.memory import should_reduce_batch_size

from shared.config import options
from shared.plan.loading import current_batch

BUDGETS = ("max_tokens_per_micro_batch", "per_device_train_batch_size")


def ran_out(error: BaseException) -> bool:
    """Whether an error means that a device or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, Exception) and should_reduce_batch_size(error)
    )


def advice(config: options.Options) -> str:
    """The error line of a run that is out of memory: the shape of the micro-batch and the flags to lower."""
    limits = [f"--{name} {value}" for name in BUDGETS if (value := getattr(config, name, None))]
    fix = f"lower {' or '.join(limits)}" if limits else f"set --{BUDGETS[-1]}"
    where = f"on a micro-batch of {current_batch.shape}" if current_batch.shape else "before the first micro-batch"
    return (
        f"process {os.environ.get('RANK', 0)} ran out of memory {where}: {fix}; if this run has a "
        "checkpoint, also use another --output_dir, because a resumed run keeps its budget"
    )
