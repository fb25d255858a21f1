"""The exponential moving average of a model's weights, evaluated and exported in place of the last ones."""

from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shared.compat import of_torch
from shared.errors import UserError
from shared.models.batch_norm import RunningAverages


class WeightAverage:
    """torch's AveragedModel of a model's weights and buffers, kept in checkpoints; without a decay, nothing.

    How many steps are in it is counted on the host, where torch's `update_parameters` would wait for a GPU.

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
        self.take_in = get_ema_multi_avg_fn(decay)
        self.average = AveragedModel(model, accelerator.device, multi_avg_fn=self.take_in, use_buffers=True)
        self.average.n_averaged = self.average.n_averaged.cpu()
        self.average.requires_grad_(False)
        self.model = self.average.module
        accelerator.register_for_checkpointing(self.average)

    def end_step(self, statistics: RunningAverages) -> None:
        """Take in the weights and buffers of the model after a step; the first step's are copied."""
        if self.average is None:
            return
        statistics.copy_into_model()
        averages, values = (
            [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
            for model in (self.average.module, self.source)
        )
        if self.average.n_averaged == 0:
            of_torch.copy(averages, values)
        else:
            for dtype in {tensor.dtype for tensor in averages}:  # counters are averaged in another way
                pairs = [pair for pair in zip(averages, values, strict=True) if pair[0].dtype == dtype]
                self.take_in(*map(list, zip(*pairs, strict=True)), self.average.n_averaged)
        self.average.n_averaged += 1
