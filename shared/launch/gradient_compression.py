"""`--gradient_compression`: all-reduce gradients in a 16-bit format.

DDP has hooks for this, but they divide after the cast, and the one for bf16 does not run on CPUs.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed import GradBucket

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DDPSettings(DistributedDataParallelKwargs):
    """Settings of DDP: gradients are views of its buckets, and are summed in format `compression` (none: their own).

    Buffers are not broadcast, because that would overwrite batch-norm statistics averaged over processes.
    """

    def __init__(self, compression: str = "none") -> None:
        super().__init__(gradient_as_bucket_view=True, broadcast_buffers=False)
        self.dtype = DTYPES.get(compression)

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of DDP that differ from its defaults."""
        return {"gradient_as_bucket_view": True, "broadcast_buffers": False}

    def register_comm_hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Called by `Accelerator.prepare`. The hook has no state, so checkpoints need not save it."""
        if self.dtype:
            model.register_comm_hook(None, average_in(self.dtype))


def average_in(dtype: torch.dtype) -> Callable[[None, GradBucket], torch.futures.Future[Tensor]]:
    """A DDP communication hook that averages a bucket in `dtype`. It divides before the sum, to avoid overflow.

    In fp16 a gradient above 65,504 becomes infinite, and the update is skipped as for any non-finite gradient.
    """

    def hook(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        whole = bucket.buffer()
        sent = whole.div_(torch.distributed.get_world_size()).to(dtype)
        work = torch.distributed.all_reduce(sent, async_op=True)
        return work.get_future().then(lambda done: whole.copy_(done.value()[0]))

    return hook
