"""Batch norm that does not depend on the number of processes: running averages once per step, of all micro-batches.

Each micro-batch is normalized by its own statistics, and its cut is the config's. What torch does besides, moving the
running averages at each forward pass of each process, would make them those of the process and of the cut.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from shared.compat import of_torch
from shared.errors import UserError
from shared.plan.batches import MicroBatch, Plan

STEPS_AT_ONCE = 16  # whose statistics the processes add up together
FEWEST_ROWS = 16  # of a micro-batch; with fewer its statistics are too noisy (Wu and He, "Group Normalization", fig. 1)


class RunningAverages:
    """The running averages of a model's batch norms, moved once per step, by the same amount on every process.

    While the model trains its own buffers hold the statistics of the last micro-batch (torch with a momentum of 1), and
    this object holds the averages, until `copy_into_model` writes them there. A step's mean is over its samples: each
    micro-batch counts in proportion to its number of samples. The averaged variances are those within micro-batches,
    unbiased, as in torch. The processes sum the statistics of `STEPS_AT_ONCE` steps in one collective call: nobody
    reads them before, and one call per step would take a tenth of a step of 20 ms on a CPU.

    Args:
        accelerator: sums over its processes.
        model: the one that trains, with the averages to go on from. Batch norms that are in eval mode are left alone:
            frozen ones do not drift.
    """

    def __init__(self, accelerator: Any, model: nn.Module) -> None:
        self.accelerator = accelerator
        self.norms = [norm for norm in batch_norms(model) if norm.training and norm.track_running_stats]
        self.buffers = [buffer for norm in self.norms for buffer in (norm.running_mean, norm.running_var)]
        self.sizes = [len(buffer) for buffer in self.buffers]
        self.seen: list[Tensor] = []  # by each step since the last sum, on this process
        self.grad_norms: list[Tensor] = []  # of these steps
        if not self.norms:
            return
        shares = [norm.momentum for norm in self.norms for _ in range(2 * norm.num_features)]
        self.momentum = torch.tensor(shares, device=accelerator.device)
        for norm in self.norms:
            norm.momentum = 1.0
        self.averages = torch.cat(self.buffers)
        self.sums = torch.zeros_like(self.averages)
        self.steps = self.norms[0].num_batches_tracked.clone()

    def add(self, micro_batch: MicroBatch) -> None:
        """Take in the statistics of the micro-batch that has just gone through the model; a repeat is passed over."""
        if self.norms and micro_batch.counted:
            self.sums.add_(torch.cat(self.buffers), alpha=len(micro_batch.samples) / micro_batch.step_size)

    def end_step(self, grad_norm: Tensor) -> None:
        """Have a step move the averages, when they are settled; not if `grad_norm` is not finite: it was skipped."""
        if not self.norms:
            return
        self.seen.append(self.sums)
        self.grad_norms.append(grad_norm)
        self.sums = torch.zeros_like(self.averages)
        if len(self.seen) == STEPS_AT_ONCE:
            self._move()

    def copy_into_model(self) -> None:
        """Put the averages into the model's buffers, to be evaluated or saved; every process calls this.

        They are the same to the bit whenever that is done: each step's sum is in the order of the processes.
        """
        if not self.norms:
            return
        if self.seen:
            self._move()
        of_torch.copy(self.buffers, list(self.averages.split(self.sizes)))
        of_torch.copy([norm.num_batches_tracked for norm in self.norms], [self.steps] * len(self.norms))

    def _move(self) -> None:
        seen = reduce(torch.add, self.accelerator.gather(torch.stack(self.seen)[None]))  # [steps, features]
        for sums, grad_norm in zip(seen, self.grad_norms, strict=True):
            moved = torch.lerp(self.averages, sums, self.momentum)
            self.averages = torch.where(torch.isfinite(grad_norm), moved, self.averages)
        self.steps += len(self.seen)
        self.seen, self.grad_norms = [], []


def batch_norms(model: nn.Module) -> list[Any]:
    """The batch norms of a model, synchronized ones included."""
    return [module for module in model.modules() if isinstance(module, of_torch.BATCH_NORMS)]


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
