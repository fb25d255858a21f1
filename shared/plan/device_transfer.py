"""Numbers made on the host to the device, without the host waiting until the device has taken them."""

from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on `device`: to a GPU by way of pinned memory, which alone is copied in the background."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def constant(values: Any, like: Tensor) -> Tensor:
    """A list of numbers as a tensor of the type and on the device of `like`; `like.new_tensor` would wait."""
    return to_device(torch.tensor(values, dtype=like.dtype), like.device)
