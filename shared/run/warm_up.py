"""Discarded passes before the first step: one that every run begins with, and those that find what is never trained."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from shared.errors import UserError
from shared.models.requirements import checked
from shared.plan.batches import MicroBatch, Plan

PASSES, ROWS = 4, 2  # of the search for parameters that the loss does not reach; batch norm takes two samples


def freeze_unreached(
    accelerator: Accelerator, model: nn.Module, plan: Plan, compute_loss: Callable[[MicroBatch], Tensor]
) -> list[str]:
    """Freeze the trainable parameters that the loss does not depend on, say which, and return their names.

    Call it on every process, before the optimizer is made (which must not hold them) and before `prepare` (DDP waits
    for the gradient of each parameter that is not frozen). The model is moved to the device; under FSDP it is there,
    and sharded. Each process computes the same samples, so all freeze the same; so does a resumed run.

    A parameter that only some batches reach (an expert of a mixture) must not be frozen. It is told by other samples
    that reach it, or by its twin in another item of the same list of modules, which the loss does reach.

    Raises:
        UserError: which parameters the loss reaches depends on the batch; or see `own_models.checked`.
    """
    if not accelerator.is_fsdp2:
        model.to(accelerator.device)
    samples = np.linspace(0, plan.num_samples - 1, min(PASSES * ROWS, plan.num_samples)).astype(np.int64)

    def unreached(batch: np.ndarray) -> list[str]:
        micro_batch = MicroBatch(0, 0, batch, np.zeros(len(batch), np.int64), len(batch))
        with checked(model), without_a_trace(accelerator, model), accelerator.autocast():
            compute_loss(micro_batch).backward()
            return without_gradient(model)

    first, *others = (samples[i : i + ROWS] for i in range(0, len(samples), ROWS))
    if not (names := unreached(first)):
        return []
    varying = {name for batch in others for name in {*names} ^ {*unreached(batch)}}
    reached = [name for name, p in model.named_parameters() if p.requires_grad and name not in names]
    twins = {_kind(name) for name in reached}
    if routed := [name for name in (*reached, *names) if name in varying or (name in names and _kind(name) in twins)]:
        raise UserError(
            f"the loss reaches some parameters on some batches only ({shown(routed)}), as in a mixture of experts: no "
            "exact run on several processes can be made of that; if they are never used, freeze them in build_model "
            "(requires_grad_(False))"
        )
    parameters = dict(model.named_parameters())
    for name in names:
        parameters[name].requires_grad_(False)
    accelerator.print(
        f"frozen, because the loss does not depend on them: {shown(list(dict.fromkeys(map(_kind, names))))}"
    )
    return names


def run_warm_up_pass(accelerator: Accelerator, model: nn.Module, compute_loss: Callable[[], Tensor]) -> None:
    """Run `compute_loss` forward and backward once, synchronized, and leave no trace of it.

    DDP rearranges its buckets after the first backward pass, and with them the order of summation from three processes
    on; when every run begins with a discarded pass, a resumed one sums in the same order as an uninterrupted one. It
    also finds what would otherwise end the run later: parameters without a gradient, and too little memory.

    Raises:
        UserError: names the trainable parameters that the loss does not depend on.
    """
    with without_a_trace(accelerator, model):
        compute_loss().backward()
        unused = without_gradient(accelerator.unwrap_model(model))
    if unused:
        raise UserError(
            f"the loss does not depend on these parameters, so they would never be trained: {shown(unused)}; "
            "freeze them (requires_grad_(False)) or use them in the forward pass"
        )


@contextmanager
def without_a_trace(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """What is computed inside changes neither gradients nor buffers nor the random state."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[accelerator.device] if accelerator.device.type == "cuda" else []):
        yield
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


def without_gradient(model: nn.Module) -> list[str]:
    """The names of the trainable parameters that have no gradient."""
    return [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]


def shown(names: list[str]) -> str:
    """The first five names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _kind(name: str) -> str:
    """A parameter's name, the same for all items of a list of modules."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)
