"""Discarded passes before the first step: the warm-up of every run, and a search for parameters without a gradient."""

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

PASSES, ROWS = 4, 2  # of that search; batch norm needs two samples


def freeze_unreached(
    accelerator: Accelerator, model: nn.Module, plan: Plan, compute_loss: Callable[[MicroBatch], Tensor]
) -> list[str]:
    """Freeze the trainable parameters that the loss does not depend on; print and return their names.

    Call it on every process, before the optimizer is made (which must not hold them) and before `prepare` (DDP waits
    for the gradient of each parameter that is not frozen). The model is moved to the device; under FSDP it is there,
    and sharded. Each process computes the same samples, so all freeze the same; so does a resumed run.

    A parameter that only some batches use (an expert of a mixture) must not be frozen. It is recognized in two ways:
    other samples use it, or the loss depends on the same parameter of another item in its list of modules.

    Raises:
        UserError: the loss depends on some parameters only for some batches; or see `requirements.checked`.
    """
    if not accelerator.is_fsdp2:
        model.to(accelerator.device)
    samples = np.linspace(0, plan.num_samples - 1, min(PASSES * ROWS, plan.num_samples)).astype(np.int64)

    def unreached(batch: np.ndarray) -> list[str]:
        micro_batch = MicroBatch(0, 0, batch, np.zeros(len(batch), np.int64), len(batch))
        eager = torch.compiler.set_stance("force_eager")  # not worth compiling for so few rows
        with eager, checked(model), restored_afterwards(accelerator, model), accelerator.autocast():
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
            f"the loss depends on some parameters only for some batches ({shown(routed)}), as in a mixture of experts: "
            "such a model cannot be trained exactly on several processes; if the parameters are never used, freeze "
            "them in build_model (requires_grad_(False))"
        )
    parameters = dict(model.named_parameters())
    for name in names:
        parameters[name].requires_grad_(False)
    accelerator.print(
        f"frozen, because the loss does not depend on them: {shown(list(dict.fromkeys(map(_kind, names))))}"
    )
    return names


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
            f"the loss does not depend on these parameters, so they would never be trained: {shown(unused)}; "
            "freeze them (requires_grad_(False)) or use them in the forward pass"
        )


@contextmanager
def restored_afterwards(accelerator: Accelerator, model: nn.Module) -> Iterator[None]:
    """After the computations inside, clear the gradients and restore the buffers and torch's random state."""
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
    """A parameter's name without the index of its module in a list, so that all items of the list have the same."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)
