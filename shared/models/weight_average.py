"""The exponential moving average of a model's weights, evaluated and exported instead of the last weights."""

from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shared.compat import of_torch
from shared.errors import UserError
from shared.monitoring.hooks import Hook


class WeightAverage(Hook):
    """torch's AveragedModel of a model's weights and buffers, saved in checkpoints. Without a decay it does nothing.
    It is a hook of the run, given to `prepare`.

    The host counts the averaged steps, because torch's `update_parameters` would wait for the GPU.

    Args:
        accelerator: saves and loads the average in its checkpoints.
        model: the model to train, before `prepare`, which under mixed precision binds its forward to its own weights.
        decay: share of the average that each step keeps; None: no average, and the attribute `model` is None.

    Raises:
        UserError: FSDP is used; torch's AveragedModel does not support its shards.
    """

    def __init__(self, accelerator: Any, model: nn.Module, decay: float | None) -> None:
        self.source, self.average = model, None
        self.model: nn.Module | None = None
        if decay is None:
            return
        if accelerator.is_fsdp2:
            raise UserError(f"--ema_decay {decay} does not work under FSDP: leave it out, or use multi_gpu.yaml")
        self.move = get_ema_multi_avg_fn(decay)
        self.average = AveragedModel(model, accelerator.device, multi_avg_fn=self.move, use_buffers=True)
        self.average.n_averaged = self.average.n_averaged.cpu()
        self.average.requires_grad_(False)
        self.model = self.average.module
        accelerator.register_for_checkpointing(self.average)

    def prepared(self, run: Any) -> None:
        """Keep the run, whose other hooks complete the model's buffers."""
        self.run = run

    def updated(self, grad_norm: Tensor) -> None:
        """Average the weights of a step."""
        if self.average is not None:
            self.run.weights_are_read()
            self.end_step()

    def end_step(self) -> None:
        """Add the weights and buffers of the model to the average; after the first step, copy them."""
        assert self.average is not None
        averages, values = (
            [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
            for model in (self.average.module, self.source)
        )
        if self.average.n_averaged == 0:
            of_torch.copy(averages, values)
        else:
            for dtype in {tensor.dtype for tensor in averages}:  # the update function treats integers differently
                pairs = [pair for pair in zip(averages, values, strict=True) if pair[0].dtype == dtype]
                self.move(*map(list, zip(*pairs, strict=True)), self.average.n_averaged)
        self.average.n_averaged += 1
