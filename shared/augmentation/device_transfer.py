"""Copies tensors from the host to the device without making the host wait."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`; to a GPU through pinned memory, because only that is copied asynchronously."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to(device: torch.device, values: NDArray[np.float64]) -> Tensor:
    """Copy numbers from the CPU to the device as float32."""
    return to_device(torch.from_numpy(values.astype(np.float32)), device)


def constant(values: Any, like: Tensor) -> Tensor:
    """A list of numbers as a tensor with the dtype and device of `like`; `like.new_tensor` would make the host wait."""
    return to_device(torch.tensor(values, dtype=like.dtype), like.device)
