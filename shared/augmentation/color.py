"""Pillow's ImageEnhance and ImageOps for whole batches: float32 [rows, 3, height, width], integers 0 ... 255.

Factors and thresholds are float32 [rows, 1, 1, 1], one per image.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

GREY = np.array([0.299, 0.587, 0.114])[:, None, None]
SMOOTH = np.array([[1.0, 1.0, 1.0], [1.0, 5.0, 1.0], [1.0, 1.0, 1.0]])


def to(device: torch.device, values: NDArray[Any]) -> Tensor:
    """Copy numbers to the device, fractions as float32; to a GPU from pinned memory: only such copies do not wait."""
    tensor = torch.from_numpy(values.astype(np.float32) if values.dtype.kind == "f" else values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def blend(images: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    """Interpolate: `other` at factor 0, the image at factor 1; larger factors extrapolate."""
    return (other + factors * (images - other)).clamp(0, 255).floor()


def grey(images: Tensor) -> Tensor:
    """Luminance [rows, 1, height, width], rounded like Pillow's convert("L")."""
    return (images * to(images.device, GREY)).sum(1, keepdim=True).add(0.5).floor()


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Interpolate between black (factor 0) and the image (1)."""
    return blend(images, torch.zeros_like(images), factors)


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Interpolate between the image's mean luminance (factor 0) and the image (1)."""
    return blend(images, grey(images).mean((1, 2, 3), keepdim=True).add(0.5).floor(), factors)


def saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Interpolate between greyscale (factor 0) and the image (1)."""
    return blend(images, grey(images), factors)


def hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Shift the hue of HSV by shares of the color circle, float32 [rows, 1, 1, 1] in -0.5 ... 0.5."""
    red, green, blue = images.unbind(1)
    value, least = images.amax(1), images.amin(1)
    chroma = value - least
    some = chroma.clamp(min=1)  # avoids 0 / 0 for grey pixels, whose hue has no effect
    sixths = torch.where(
        value == red,
        (green - blue) / some,
        torch.where(value == green, 2 + (blue - red) / some, 4 + (red - green) / some),
    )
    channels = []
    for first in (5, 3, 1):  # the sixth of the circle where red, green and blue begin to fall
        place = (sixths + 6 * shifts[:, 0] + first).remainder(6)
        channels.append(value - chroma * torch.minimum(place, 4 - place).clamp(0, 1))
    return torch.stack(channels, 1).add_(0.5).floor_()


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Interpolate between the image smoothed by a 3 x 3 kernel, except its border, (factor 0) and the image (1)."""
    kernel = to(images.device, SMOOTH).div(13).expand(3, 1, 3, 3)
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel, groups=3).add(0.5).floor()
    return blend(images, smooth, factors)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the highest `bits` of each value and set the others to 0."""
    step = 2 ** (8 - bits)
    return (images / step).floor() * step


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert the values at or above the threshold."""
    return torch.where(images < thresholds, images, 255 - images)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to 0 ... 255; a channel with a single value is unchanged."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    scale = 255 / (high - low).clamp(min=1)
    return torch.where(high > low, ((images - low) * scale + 1e-3).floor().clamp(0, 255), images)


def equalize(images: Tensor) -> Tensor:
    """Equalize the histogram of each channel, with Pillow's integer arithmetic."""
    values = images.long().flatten(2)
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, values, torch.ones_like(values))
    last = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - last) // 255
    before = counts.cumsum(2) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step[..., None] > 0, table.gather(2, values).view(images.shape).float(), images)
