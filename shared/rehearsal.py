"""One discarded forward and backward pass before the first step."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from shared.errors import UserError


def rehearse(accelerator: Accelerator, model: nn.Module, compute_loss: Callable[[], Tensor]) -> None:
    """Run `compute_loss` forward and backward once, synchronized, and leave no trace of it.

    DDP rearranges its buckets after the first backward pass, and with them the order of summation from three processes
    on; when every run begins with a discarded pass, a resumed one sums in the same order as an uninterrupted one. It
    also finds what would otherwise end the run later: parameters without a gradient, and too little memory.

    Raises:
        UserError: names the trainable parameters that the loss does not depend on.
    """
    buffers = [buffer.clone() for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[accelerator.device] if accelerator.device.type == "cuda" else []):
        compute_loss().backward()
    unused = [
        name for name, p in accelerator.unwrap_model(model).named_parameters() if p.requires_grad and p.grad is None
    ]
    if unused:
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if len(unused) > 5 else "")
        raise UserError(
            f"the loss does not depend on these parameters, so they would never be trained: {shown}; "
            "freeze them (requires_grad_(False)) or use them in the forward pass"
        )
    model.zero_grad()
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
