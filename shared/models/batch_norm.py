"""Batch norm that does not depend on the number of processes: one update of the running averages per step.

Each micro-batch is normalized by its own statistics, and the config determines the micro-batches. Torch updates the
running averages at each forward pass, so that they depend on the process and on its micro-batches.
"""

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from shared.compat import of_torch, of_torch_models
from shared.errors import UserError
from shared.monitoring.hooks import Hook
from shared.plan.batches import MicroBatch, Plan

STEPS_AT_ONCE = 16  # steps whose statistics the processes sum in one collective call
FEWEST_ROWS = 16  # smaller micro-batches have too noisy statistics (Wu and He, "Group Normalization", fig. 1)


class BatchNorm(Hook):
    """Gives a run the running averages of its model's batch norms, updated once per step and equally on every process.

    While the model trains, its buffers hold the statistics of the last micro-batch (torch with a momentum of 1). This
    object holds the averages until `weights_are_read` writes them into the buffers. The statistics of a step are means
    over its samples: each micro-batch has a weight proportional to its number of samples. The averaged variances are
    the unbiased ones within micro-batches, as in torch. The processes sum the statistics of `STEPS_AT_ONCE` steps in
    one collective call: nothing reads them earlier, and a call per step would take 2 ms of a 20 ms step on a CPU.

    Batch norms in eval mode (frozen ones) are not updated. If a norm runs several times in a micro-batch, the
    statistics of its last run count.
    """

    def given(self, run: Any, model: nn.Module) -> None:
        """Take over the norms before the first forward pass: compiled layers compile again if the momentum changes.

        SyncBatchNorm waits for a micro-batch of each process.

        Raises:
            UserError: a batch norm has no momentum, so that it weights all forward passes equally.
        """
        self.accelerator = run.accelerator
        self.norms = [norm for norm in batch_norms(model) if norm.training and norm.track_running_stats]
        if any(norm.momentum is None for norm in self.norms):
            raise UserError("a batch norm with momentum=None has no averages per step: set momentum=0.1 in the model")
        self.shares = [norm.momentum for norm in self.norms for _ in range(2 * norm.num_features)]
        for norm in self.norms:
            norm.momentum = 1.0
        if any(isinstance(norm, nn.SyncBatchNorm) for norm in batch_norms(model)):
            run.plan.equal_counts = True
            run.plan.depends_on_processes = "--sync_batchnorm normalizes over one micro-batch of every process"

    def averaged_buffers(self, model: nn.Module) -> list[Tensor]:
        """All buffers of batch norms, also of frozen ones."""
        return [buffer for norm in batch_norms(model) for buffer in norm.buffers()]

    def loaded(self, run: Any) -> None:
        """Read the averages from the buffers of the loaded model, and warn on the launch card."""
        run.card |= notes(run.model, run.plan, run.progress.step)
        self.buffers = [buffer for norm in self.norms for buffer in (norm.running_mean, norm.running_var)]
        self.pending: list[Tensor] = []  # statistics of each step since the last collective call, of this process
        self.grad_norms: list[Tensor] = []  # gradient norms of these steps
        if self.norms:
            self.momentum = torch.tensor(self.shares, device=self.accelerator.device)
            self.averages = torch.cat(self.buffers)
            self.sums = torch.zeros_like(self.averages)
            self.steps = self.norms[0].num_batches_tracked.clone()

    def counted(self, micro_batch: MicroBatch) -> None:
        """Add the statistics of the micro-batch of the last forward pass, unless the micro-batch is a repeat."""
        if self.norms and micro_batch.counted:
            self.sums.add_(torch.cat(self.buffers), alpha=len(micro_batch.samples) / micro_batch.step_samples)

    def updated(self, grad_norm: Tensor) -> None:
        """Finish a step: its statistics update the averages later, unless `grad_norm` is not finite (skipped step)."""
        if not self.norms:
            return
        self.pending.append(self.sums)
        self.grad_norms.append(grad_norm)
        self.sums = torch.zeros_like(self.averages)
        if len(self.pending) == STEPS_AT_ONCE:
            self._update_averages()

    def weights_are_read(self) -> None:
        """Write the averages into the model's buffers.

        The bits of the averages do not depend on when this is called: each step is summed in the order of the ranks.
        """
        if not self.norms:
            return
        if self.pending:
            self._update_averages()
        of_torch.copy(self.buffers, list(self.averages.split([len(buffer) for buffer in self.buffers])))
        of_torch.copy([norm.num_batches_tracked for norm in self.norms], [self.steps] * len(self.norms))

    def _update_averages(self) -> None:
        totals = reduce(torch.add, self.accelerator.gather(torch.stack(self.pending)[None]))  # [steps, features]
        for sums, grad_norm in zip(totals, self.grad_norms, strict=True):
            moved = torch.lerp(self.averages, sums, self.momentum)
            self.averages = torch.where(torch.isfinite(grad_norm), moved, self.averages)
        self.steps += len(self.pending)
        self.pending, self.grad_norms = [], []


def batch_norms(model: nn.Module) -> list[Any]:
    """The batch norms of a model, including SyncBatchNorm."""
    return [module for module in model.modules() if isinstance(module, of_torch_models.BATCH_NORM)]


def synchronize(model: nn.Module) -> nn.Module:
    """Convert the batch norms to torch's SyncBatchNorm: statistics over one micro-batch of every process.

    Raises:
        UserError: the model has no batch norm.
    """
    if not batch_norms(model):
        raise UserError("--sync_batchnorm has no effect on a model without batch norm: leave it out")
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def notes(model: nn.Module, plan: Plan, step: int) -> dict[str, str]:
    """The warning of the launch card about batch norms whose micro-batches at `step` are small; {} without one."""
    norms = [norm for norm in batch_norms(model) if norm.training]
    if not norms or any(isinstance(norm, nn.SyncBatchNorm) for norm in norms):
        return {}
    rows = min(len(piece.samples) for piece in plan.cut(min(step, plan.total_steps - 1)))
    if rows >= FEWEST_ROWS:
        return {}
    return {
        "batch norm": f"micro-batches of {rows} samples, fewer than {FEWEST_ROWS}, give noisy statistics: raise "
        "--per_device_train_batch_size, or on GPUs use --sync_batchnorm (images)"
    }
