"""Copies tensors from the host to the device without making the host wait."""

from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`; to a GPU through pinned memory, because only that is copied asynchronously."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def constant(values: Any, like: Tensor) -> Tensor:
    """A list of numbers as a tensor with the dtype and device of `like`; `like.new_tensor` would make the host wait."""
    return to_device(torch.tensor(values, dtype=like.dtype), like.device)
