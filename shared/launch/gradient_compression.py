"""`--gradient_compression`: gradients travel between processes in half the bytes.

DDP's own hooks of this kind divide after the cast, and the one for bf16 refuses to run on CPUs.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.distributed import GradBucket

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DDPSettings(DistributedDataParallelKwargs):
    """What DDP is told: gradients live in its buckets, and are summed in `compression`; none is DDP's own sum.

    DDP's broadcast of rank 0's buffers at every step would undo batch-norm statistics averaged over processes.
    """

    def __init__(self, compression: str = "none") -> None:
        super().__init__(gradient_as_bucket_view=True, broadcast_buffers=False)
        self.dtype = DTYPES.get(compression)

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of DDP that are not its defaults."""
        return {"gradient_as_bucket_view": True, "broadcast_buffers": False}

    def register_comm_hook(self, model: nn.parallel.DistributedDataParallel) -> None:
        """Called by `Accelerator.prepare`. The hook has no state that a checkpoint would have to keep."""
        if self.dtype:
            model.register_comm_hook(None, average_in(self.dtype))


def average_in(dtype: torch.dtype) -> Callable[[None, GradBucket], torch.futures.Future[Tensor]]:
    """A communication hook that averages a bucket over all processes, divided first, so that the sum overflows later.

    In fp16 a gradient beyond 65,504 becomes infinite, and its update is skipped like any other that is not finite.
    """

    def hook(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        whole = bucket.buffer()
        sent = whole.div_(torch.distributed.get_world_size()).to(dtype)
        work = torch.distributed.all_reduce(sent, async_op=True)
        return work.get_future().then(lambda done: whole.copy_(done.value()[0]))

    return hook
