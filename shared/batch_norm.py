"""Batch norm that does not depend on the number of processes: running averages once per step, of all micro-batches.

Each micro-batch is normalized by its own statistics, and its cut is the config's. What torch does besides, moving the
running averages at each forward pass of each process, would make them those of the process and of the cut.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shared.batches import MicroBatch, Plan
from shared.errors import UserError

FEWEST_ROWS = 16  # of a micro-batch; with fewer its statistics are too noisy (Wu and He, "Group Normalization", fig. 1)


class RunningAverages:
    """The running averages of a model's batch norms, moved once per step, by the same amount on every process.

    Between `add` and `end_step` the model's own buffers hold the statistics of the last micro-batch (torch with a
    momentum of 1), and this object the averages. A step's mean is over its samples: each micro-batch weighs as many as
    it has. The variances averaged are those within micro-batches, unbiased, as torch's are.

    Args:
        accelerator: sums over its processes, in one collective call per step.
        model: the one that trains. Batch norms that are in eval mode are left alone: frozen ones do not drift.
    """

    def __init__(self, accelerator: Any, model: nn.Module) -> None:
        self.accelerator = accelerator
        self.norms = [norm for norm in batch_norms(model) if norm.training and norm.track_running_stats]
        self.buffers = [buffer for norm in self.norms for buffer in (norm.running_mean, norm.running_var)]
        self.sizes = [len(buffer) for buffer in self.buffers]
        if not self.norms:
            return
        shares = [norm.momentum for norm in self.norms for _ in range(2 * norm.num_features)]
        self.momentum = torch.tensor(shares, device=accelerator.device)
        for norm in self.norms:
            norm.momentum = 1.0
        self.begin()

    def begin(self) -> None:
        """Go on from what the model's buffers hold; call it after they were loaded."""
        if self.norms:
            self.averages = torch.cat(self.buffers)
            self.sums = torch.zeros_like(self.averages)
            self.steps = self.norms[0].num_batches_tracked.clone()

    def add(self, micro_batch: MicroBatch) -> None:
        """Take in the statistics of the micro-batch that has just gone through the model; a repeat is passed over."""
        if self.norms and micro_batch.counted:
            self.sums.add_(torch.cat(self.buffers), alpha=len(micro_batch.samples) / micro_batch.step_size)

    def end_step(self, grad_norm: Tensor) -> None:
        """Move the averages by what all processes have seen in the step, and put them into the model's buffers.

        A step whose update is skipped, because `grad_norm` is not finite, leaves them as they were.
        """
        if not self.norms:
            return
        seen = self.accelerator.reduce(self.sums, "sum") if self.accelerator.num_processes > 1 else self.sums
        moved = torch.lerp(self.averages, seen, self.momentum)
        self.averages = torch.where(torch.isfinite(grad_norm), moved, self.averages)
        self.sums = torch.zeros_like(self.averages)
        self.steps += 1
        torch._foreach_copy_(self.buffers, list(self.averages.split(self.sizes)))
        torch._foreach_copy_([norm.num_batches_tracked for norm in self.norms], [self.steps] * len(self.norms))


def batch_norms(model: nn.Module) -> list[Any]:
    """The batch norms of a model, synchronized ones included."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def synchronize(accelerator: Any, model: nn.Module) -> nn.Module:
    """The model with torch's SyncBatchNorm: statistics over one micro-batch of every process.

    Raises:
        UserError: there is no GPU, where alone it works, or no batch norm.
    """
    if accelerator.device.type != "cuda":
        raise UserError(
            "--sync_batchnorm needs a GPU, torch's SyncBatchNorm has no other kernels: leave it out, and make the "
            "micro-batches larger with --per_device_train_batch_size"
        )
    if not batch_norms(model):
        raise UserError("--sync_batchnorm has no effect on a model without batch norm: leave it out")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def notes(model: nn.Module, plan: Plan, step: int) -> dict[str, str]:
    """What the launch card says about a model's batch norms at `step`: nothing, unless something is to be known."""
    norms = [norm for norm in batch_norms(model) if norm.training]
    rows = min(len(piece.samples) for piece in plan.cut(min(step, plan.total_steps - 1)))
    if any(isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        return {
            "batch norm": "synchronized: normalized over one micro-batch of every process, so the run now depends on "
            "the number of processes"
        }
    if norms and rows < FEWEST_ROWS:
        return {
            "batch norm": f"micro-batches of {rows} samples, fewer than {FEWEST_ROWS}, give noisy statistics: raise "
            "--per_device_train_batch_size, or on GPUs use --sync_batchnorm"
        }
    return {}
