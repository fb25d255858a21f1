"""`--gradient_compression`: all-reduce gradients in a 16-bit format.

DDP has hooks for this, but they divide after the cast, and the one for bf16 does not run on CPUs.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket

from shared.monitoring.hooks import Hook

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class GradientCompression(Hook):
    """Makes DDP average gradients in the format of --gradient_compression, if there is one and several processes."""

    def prepared(self, run: Any) -> None:
        """Register a hook of DDP, which keeps nothing, so checkpoints need not save it; say so on the launch card."""
        compression = run.config.gradient_compression
        if compression != "none" and run.accelerator.num_processes > 1:
            run.card["gradients"] = f"sent and summed in {compression}"
            run.model.register_comm_hook(DTYPES[compression], average)


def average(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """A DDP communication hook that averages a bucket in `dtype`. It divides before the sum, to avoid overflow.

    In fp16 a gradient above 65,504 becomes infinite, and the update is skipped as for any non-finite gradient.
    """
    whole = bucket.buffer()
    sent = whole.div_(torch.distributed.get_world_size()).to(dtype)
    work = torch.distributed.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda done: whole.copy_(done.value()[0]))
