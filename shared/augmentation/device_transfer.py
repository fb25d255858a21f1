"""Copies numbers from the host to the device without making the host wait."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to(device: torch.device, values: NDArray[Any]) -> Tensor:
    """Copy numbers to the device, fractions as float32; to a GPU from pinned memory: only such copies do not wait."""
    tensor = torch.from_numpy(values.astype(np.float32) if values.dtype.kind == "f" else values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)
