"""Gradients between the loss and the optimizer: summed over processes, clipped, dropped.

What Accelerate's methods of the same purpose do, to the bit, at less cost per step (docs/performance.md says how much).
"""

import math

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from shared.compat import of_torch

HOST = "cpu"  # where to read a number is no waiting


def backward(accelerator: Accelerator, loss: Tensor) -> None:
    """Add the gradients of `loss`, a process's share of a sum over all of them: DDP averages, and the sum is meant.

    Accelerate's `backward` puts one more operation into the graph.
    """
    if accelerator.num_processes > 1:
        loss = loss * accelerator.num_processes
    if accelerator.scaler is not None:
        loss = accelerator.scaler.scale(loss)
    loss.backward()


def set_to_none(parameters: list[nn.Parameter]) -> None:
    """What `zero_grad` does, without Accelerate's look at its signature."""
    for parameter in parameters:
        parameter.grad = None


def clip(accelerator: Accelerator, parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the synchronized gradients down to `max_norm` (0: leave them) and return their norm before that, a scalar.

    Under fp16 Accelerate unscales them first. The operations are those of torch's `clip_grad_norm_`, without what it
    spends on gradients of several devices and formats.
    """
    if accelerator.is_fsdp2:
        norm = accelerator.clip_grad_norm_(parameters, max_norm or math.inf)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # FSDP2 shards the norm, too
    accelerator.unscale_gradients()
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(of_torch.norms(gradients)))
    if max_norm and norm.device.type == HOST and norm.dtype == torch.float32 and type(norm) is Tensor:
        # The host may look at the norm: arithmetic without torch's calls, and no pass over gradients that are short.
        factor = np.float32(1) / (np.float32(norm.item()) + np.float32(1e-6)) * np.float32(max_norm)
        if not factor >= 1:
            of_torch.multiply(gradients, float(factor))
    elif max_norm:
        of_torch.multiply(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
