"""Discarded passes before the first step: checks of the loss and of its gradients, and a warm-up."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from shared.errors import UserError, listed
from shared.monitoring.evaluation import evaluating
from shared.plan.batches import MicroBatch, Plan
from shared.plan.draws import seed_dropout

ROWS = 2  # samples of a pass; batch norm needs two
TOLERANCE = 1e-3  # relative, of a loss; a GPU may sum in another order in each pass
COPIES = 3  # of a sample; with two, a contrastive loss of equal embeddings can grow as losses [n, n] do
GROWTH = (  # of wrong losses that exceed a minimum: close to 0, some contrastive losses grow as losses [n, n] do
    (1, 0.0, "a mean does"),
    (COPIES**2, 0.01, "losses [n, n] do, of predictions [n, 1] and targets [n]"),
)
SAME = "draw only from the generators of random, NumPy and torch, and keep what a model changes in its buffers"
CONTRACT = "return the sum of a micro-batch's losses, divided by micro_batch.normalizer (docs/your_own_recipe.md)"


def check_loss(
    accelerator: Accelerator,
    model: nn.Module,
    plan: Plan,
    compute_loss: Callable[[MicroBatch], Tensor],
    averaged: Sequence[Tensor] = (),
) -> None:
    """Refuse a loss that is not a sum divided by the normalizer, and buffers that depend on the number of processes.

    Call it on every process. At most five forward passes over one or two samples of a micro-batch, the same on each
    process, show what the loss depends on. A mean that is divided by the normalizer as well, and losses of pairs of
    samples, are recognized only in a micro-batch of three or more samples.

    Raises:
        UserError: the loss is not one number with a gradient, differs in a second pass, or is no sum divided by the
            normalizer; the model has buffers, other than `averaged`, that change in a forward pass, and there are
            several processes.
    """
    pieces = plan.cut(0)
    whole = pieces[len(pieces) // 2]  # its samples are neither the longest nor the shortest
    few = replace(whole, samples=whole.samples[-ROWS:], epochs=whole.epochs[-ROWS:])
    one = replace(few, samples=few.samples[-1:], epochs=few.epochs[-1:])
    copies = replace(few, samples=one.samples.repeat(COPIES), epochs=one.epochs.repeat(COPIES))

    def loss_of(micro_batch: MicroBatch) -> float:
        with discarded(accelerator, model) as before:
            loss = compute_loss(micro_batch)
            if changed := [name for name in watched if not torch.equal(model.get_buffer(name), before[name])]:
                raise UserError(
                    f"the model changes {listed(changed)} in each forward pass, so they would differ between processes "
                    "(those of torch.nn.BatchNorm are averaged if run.prepare gets the hook BatchNorm() of "
                    "shared/models): give it, replace the module that holds them, or start one process"
                )
        if not isinstance(loss, Tensor) or loss.shape or not loss.requires_grad:
            raise UserError(f"compute_loss returned no tensor that is one number and has a gradient: {CONTRACT}")
        return float(loss.detach())

    saved, left_out = model.state_dict().keys(), {id(buffer) for buffer in averaged}
    buffers = model.named_buffers() if accelerator.num_processes > 1 else ()  # comparing them waits for a GPU
    watched = [name for name, buffer in buffers if name in saved and id(buffer) not in left_out]
    twice = replace(few, step_size=2 * few.step_size, step_samples=2 * few.step_samples)
    loss, halved, repeat = map(loss_of, (few, twice, replace(few, counted=False)))
    if not math.isfinite(loss) or not loss:
        return
    if not math.isclose(2 * halved, loss, rel_tol=TOLERANCE) or not abs(repeat) <= TOLERANCE * abs(loss):
        same = math.isclose(loss_of(few), loss, rel_tol=TOLERANCE)
        raise UserError(
            f"compute_loss gives {loss:g} for a micro-batch, {halved:g} instead of {loss / 2:g} with twice the "
            f"normalizer, and {repeat:g} instead of 0 for a repeat that does not count"
            + (f": {CONTRACT}" if same else f"; and another value in a second pass over the first one: {SAME}")
        )
    once = more = math.nan
    if len(whole.samples) >= COPIES:  # no more than a micro-batch takes
        with evaluating(model), suppress(Exception):  # some models compute a loss only in training mode
            once, more = loss_of(one), loss_of(copies)
    for factor, minimum, cause in GROWTH:  # of 0: some have no loss in evaluation mode
        if math.isclose(more, factor * once, rel_tol=TOLERANCE / 10) and abs(once) * one.normalizer > minimum:
            raise UserError(
                f"compute_loss gives {once:g} for a sample and {more:g} for {COPIES} copies, as {cause}: {CONTRACT}"
            )


@contextmanager
def discarded(accelerator: Accelerator, model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """As `restored_afterwards`, for a pass over a few samples; each pass draws the same numbers."""
    eager = torch.compiler.set_stance("force_eager")  # not worth compiling for so few rows
    with eager, restored_afterwards(accelerator, model) as buffers, accelerator.autocast():
        seed_dropout(accelerator.device, 0, 0, 0)
        yield buffers


def run_warm_up_pass(accelerator: Accelerator, model: nn.Module, compute_loss: Callable[[], Tensor]) -> None:
    """Run `compute_loss` forward and backward once, synchronized, and discard the result.

    After the first backward pass DDP rearranges its buckets, which changes the order of summation on three or more
    processes. Every run begins with this pass, so a resumed run sums in the same order as an uninterrupted one. The
    pass also finds early what would end the run later: parameters without a gradient, and too little memory.

    Raises:
        UserError: names the trainable parameters that the loss does not depend on.
    """
    with restored_afterwards(accelerator, model):
        compute_loss().backward()
        unused = without_gradient(accelerator.unwrap_model(model))
    if unused:
        raise UserError(
            f"the loss does not depend on these parameters, so they would never be trained: {listed(unused)}; "
            "freeze them (requires_grad_(False), or the hook FreezeUnreached() of shared/models), or use them in each "
            "forward pass: a mixture of experts cannot be trained exactly on several processes"
        )


@contextmanager
def restored_afterwards(accelerator: Accelerator, model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Give copies of the buffers by name; afterwards restore them and torch's random state, and clear the gradients."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.random.fork_rng(devices=[accelerator.device] if accelerator.device.type == "cuda" else []):
        yield before
    model.zero_grad()
    with torch.no_grad():
        for name, buffer in before.items():
            model.get_buffer(name).copy_(buffer)


def without_gradient(model: nn.Module) -> list[str]:
    """The names of the trainable parameters that have no gradient."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
