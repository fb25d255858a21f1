"""How many floating-point operations a model asks for, and how many the hardware can do: model FLOPs utilization.

Counted are matrix products of the model, forward and backward, never what an implementation adds (padding, recomputed
activations): 2 operations per weight and token forward and 4 backward, and attention by the length of the document.
docs/pretraining.md has the formula.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

# Dense peak in bf16 and fp16, operations per second, from the makers' data sheets; by a part of the device's name.
PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "GH200": 989.4e12, "A100": 312e12, "A10G": 70e12, "L4": 121e12}


def masked_lm_flops(model: Any, lengths: NDArray[np.int64], masked: NDArray[np.int64]) -> NDArray[np.float64]:
    """Operations of a training step on each sample, [N], of an encoder whose head sees hidden tokens only.

    Args:
        model: some ...ForMaskedLM of transformers.
        lengths, masked: int64 [N], tokens of each sample and how many of them are hidden.
    """
    encoder = linear_weights(model.base_model)
    head = linear_weights(model) - encoder
    config, size = model.config, lengths.astype(np.float64)
    attention = np.zeros(len(size))
    for kind in getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers:
        window = 2 * config.sliding_window + 1 if kind == "sliding_attention" else np.inf
        attention += 12 * config.hidden_size * size * np.minimum(size, window)
    return 6 * encoder * size + 6 * head * masked + attention


def linear_weights(module: nn.Module) -> int:
    """The weights of all linear layers in a module: each is multiplied once per token."""
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


def peak_flops(accelerator: Any) -> float | None:
    """What all processes' devices can do per second in the run's precision; None where that is not known."""
    if accelerator.device.type != "cuda" or accelerator.mixed_precision not in ("bf16", "fp16"):
        return None
    name = torch.cuda.get_device_name(accelerator.device)
    peak = next((peak for part, peak in PEAKS.items() if part in name), None)
    return peak and peak * accelerator.num_processes
