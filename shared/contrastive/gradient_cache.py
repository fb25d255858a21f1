"""Gradients of a contrastive loss whose negatives are the whole global batch, computed in micro-batches.

GradCache (Gao et al., 2021, arXiv:2101.06983). The loss of a sample depends on all texts of the batch, whose
activations together may not fit into memory. The first pass computes the embeddings of all micro-batches without a
graph. From the embeddings of all processes, in the order of the plan, each process computes the loss and its gradient
with respect to each embedding. The second pass computes each micro-batch again, with the same dropout, and propagates
the gradients of its embeddings back. The sum of these gradients is the gradient of one pass over the whole batch.
Micro-batches whose activations fit into memory keep their graph from the first pass, and are computed only once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shared.checkpoints.staging import available_memory
from shared.contrastive.losses import CosentLoss, RankingLoss, with_gradient
from shared.errors import UserError
from shared.plan.batches import MicroBatch, Plan
from shared.processes.collectives import gather
from shared.processes.ending import local_processes

STATES = 6  # times the bytes of the weights: their gradients, two moments each, and a checkpoint of weights and moments
USED = 0.5  # of the memory that these leave; micro-batches differ, and backward passes need memory of their own
Batch = dict[str, Any]


class GradientCache:
    """The embeddings of a step and the gradient of its loss with respect to them.

    Args:
        embed: returns the embeddings [texts * rows, width] of a micro-batch, first those of all anchors, then those of
            all positives, and so on; the same in each call, also with dropout.
        kept: micro-batches of a step that keep their graph from the first pass. None: all that fit into memory.

    Raises:
        UserError: the global batch has one sample, or more samples than the data.
    """

    def __init__(
        self,
        accelerator: Any,
        plan: Plan,
        loss: RankingLoss | CosentLoss,
        embed: Callable[[MicroBatch, Batch], Tensor],
        kept: int | None,
    ) -> None:
        size = plan.global_batch_size
        if not 1 < size <= plan.num_samples:
            raise UserError(
                f"--global_batch_size {size}: the loss compares the samples of a batch with each other, and no sample "
                f"may be in it twice: use 2 to {plan.num_samples:,}, the size of the training data"
            )
        self.accelerator, self.plan, self.batch_loss, self._embed, self.kept = accelerator, plan, loss, embed, kept
        self.losses = self.gradient = torch.empty(0)  # of the current step: [G] and [texts, G, width]
        self._kept: dict[int, Tensor] = {}  # embeddings with their graph, by the number of the micro-batch
        self._bytes = 0  # that the graph of the first micro-batch keeps

    def embed(self, micro_batch: MicroBatch, batch: Batch) -> Tensor:
        """The embeddings of a micro-batch, [texts, rows, width], in float32 or float64."""
        found = self._embed(micro_batch, batch)
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        return found.view(-1, batch["labels"].shape[1], found.shape[-1])

    def fill(self, model: nn.Module, micro_batches: Sequence[tuple[MicroBatch, Batch]]) -> None:
        """Compute the embeddings of a step on all processes, and the gradient of its loss with respect to them.

        Call it on every process with its micro-batches of the step. The first `kept` of them are computed last and keep
        their graphs for the second pass, which begins with them. The backward pass of the last micro-batch must be in
        `accelerator.trigger_sync_in_backward`, because DDP synchronizes only after a forward pass outside of `no_sync`.
        """
        if self.kept is None:
            self.kept = number_that_fits(self.accelerator, model, self._bytes)
            count, shown = len(micro_batches), f"{self._bytes / 1e6:,.0f} MB each"
            self.accelerator.print(f"{min(self.kept, count)} of {count} micro-batches keep their activations, {shown}")
        with self.accelerator.no_sync(model):
            with torch.no_grad():
                found = [self.embed(*each) for each in micro_batches[self.kept :]]
            self._kept = {each[0].index: self.embed(*each) for each in micro_batches[: self.kept]}
        found = [*(each.detach() for each in self._kept.values()), *found]

        size = micro_batches[0][0].step_samples
        table = found[0].new_zeros(found[0].shape[0], size, found[0].shape[2])
        of_samples = micro_batches[0][1]["labels"]
        targets = of_samples.new_zeros(len(of_samples), size)
        for (micro_batch, batch), embeddings in zip(micro_batches, found, strict=True):
            if micro_batch.counted:
                place = slice(micro_batch.start, micro_batch.start + len(micro_batch.samples))
                table[:, place], targets[:, place] = embeddings, batch["labels"]
        if self.accelerator.num_processes > 1:  # each place is filled on one process and zero on the others
            torch.distributed.all_reduce(table)
            torch.distributed.all_reduce(targets)
        self.losses, self.gradient = with_gradient(self.batch_loss, table, targets)

    def loss(self, micro_batch: MicroBatch, batch: Batch) -> Tensor:
        """The contribution of a micro-batch to the mean loss of its global batch.

        Its gradients, summed over all micro-batches, are those of the mean loss. Before the first call of `fill`, which
        means in the passes that a run discards, the micro-batch is a batch of its own. It is embedded as often as a
        step keeps graphs, so that these passes need as much memory; once if that number is not known yet. They also
        measure the memory of one graph.
        """
        if not len(self.losses):
            most = len(self.plan.micro_batches(micro_batch.step))
            copies = [self.embed(micro_batch, batch) for _ in range(min(self.kept or 1, most) - 1)]
            embeddings, self._bytes = measured(self.accelerator.device, lambda: self.embed(micro_batch, batch))
            losses = self.batch_loss.of_samples(torch.stack([*copies, embeddings]).mean(0), batch["labels"])
            return losses.sum() / micro_batch.normalizer
        kept = self._kept.pop(micro_batch.index, None)
        embeddings = self.embed(micro_batch, batch) if kept is None else kept
        if not micro_batch.counted:
            return embeddings.sum() * 0
        place = slice(micro_batch.start, micro_batch.start + len(micro_batch.samples))
        loss = self.losses[place].sum() / micro_batch.normalizer
        backward_through = (embeddings * self.gradient[:, place]).sum()
        return loss + backward_through - backward_through.detach()


def measured(device: torch.device, forward: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result of `forward`, and the bytes that its graph keeps; on a CPU with the weights that it reads again."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        return forward(), torch.cuda.memory_allocated(device) - before
    sizes: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        sizes[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved.detach()  # the tensor itself would be a cycle of references, and its graph would stay in memory

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        return forward(), sum(sizes.values())


def number_that_fits(accelerator: Any, model: nn.Module, size: int) -> int:
    """How many graphs of `size` bytes fit into memory: at least 1, and the same on every process, which all call this.

    Under FSDP a forward pass communicates, so all processes have to make equally many.
    """
    if (device := accelerator.device).type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        on_device = -(-local_processes() // torch.cuda.device_count())  # several processes can share a GPU
        free = torch.cuda.mem_get_info(device)[0] // on_device + unused
    else:
        free = available_memory() // local_processes()
    free -= STATES * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return min(gather(accelerator, max(1, int(USED * free / max(1, size)))))
