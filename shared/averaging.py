"""The exponential moving average of a model's weights, evaluated and exported in place of the last ones."""

from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shared.batch_norm import RunningAverages
from shared.errors import UserError


class WeightAverage:
    """torch's AveragedModel over a model's weights and buffers, kept in checkpoints; without a decay, nothing.

    Args:
        accelerator: saves and loads the average with the rest of a checkpoint.
        model: the one that will train, before `prepare`, which under mixed precision ties its forward to its weights.
        decay: share of the average that stays at each step; None: there is no average, and `model` is None.

    Raises:
        UserError: under FSDP, whose shards torch's average does not know.
    """

    def __init__(self, accelerator: Any, model: nn.Module, decay: float | None) -> None:
        self.source, self.average = model, None
        self.model: nn.Module | None = None
        if decay is None:
            return
        if accelerator.is_fsdp2:
            raise UserError(f"--ema_decay {decay} does not work under FSDP: leave it out, or use multi_gpu.yaml")
        ema = get_ema_multi_avg_fn(decay)
        self.average = AveragedModel(model, accelerator.device, multi_avg_fn=ema, use_buffers=True)
        self.average.n_averaged = self.average.n_averaged.cpu()  # read at each step: the host need not wait for a GPU
        self.average.requires_grad_(False)
        self.model = self.average.module
        accelerator.register_for_checkpointing(self.average)

    def end_step(self, statistics: RunningAverages) -> None:
        """Take in the weights and buffers of the model after a step; the first step's are copied."""
        if self.average is not None:
            statistics.settle()
            self.average.update_parameters(self.source)
