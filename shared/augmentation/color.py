"""Pillow's ImageEnhance and ImageOps for whole batches: float32 [rows, 3, height, width] of whole numbers 0 ... 255.

Factors and thresholds are float32 [rows, 1, 1, 1], one for each image.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from shared.plan.device_transfer import constant

GREY = (0.299, 0.587, 0.114)


def blend(images: Tensor, other: Tensor, factors: Tensor) -> Tensor:
    """`other` at factor 0, the image at 1, and what lies on the line beyond."""
    return (other + factors * (images - other)).clamp(0, 255).floor()


def grey(images: Tensor) -> Tensor:
    """Luminance [rows, 1, height, width], rounded as Pillow's convert("L")."""
    return (images * constant(GREY, images)[:, None, None]).sum(1, keepdim=True).add(0.5).floor()


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    """Towards black."""
    return blend(images, torch.zeros_like(images), factors)


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Towards the image's mean luminance."""
    return blend(images, grey(images).mean((1, 2, 3), keepdim=True).add(0.5).floor(), factors)


def saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Towards grey."""
    return blend(images, grey(images), factors)


def hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the hue of HSV by shares of the circle: float32 [rows, 1, 1, 1] within -0.5 ... 0.5."""
    red, green, blue = images.unbind(1)
    value, least = images.amax(1), images.amin(1)
    chroma = value - least
    some = chroma.clamp(min=1)  # of a grey, whose hue does not matter
    sixths = torch.where(
        value == red,
        (green - blue) / some,
        torch.where(value == green, 2 + (blue - red) / some, 4 + (red - green) / some),
    )
    channels = []
    for first in (5, 3, 1):  # where red, green and blue begin to fall
        place = (sixths + 6 * shifts[:, 0] + first).remainder(6)
        channels.append(value - chroma * torch.minimum(place, 4 - place).clamp(0, 1))
    return torch.stack(channels, 1).add_(0.5).floor_()


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Towards the image smoothed with a 3 x 3 kernel, of which the border is the image's own."""
    kernel = constant([[1, 1, 1], [1, 5, 1], [1, 1, 1]], images).div(13).expand(3, 1, 3, 3)
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel, groups=3).add(0.5).floor()
    return blend(images, smooth, factors)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper `bits` of each value."""
    step = 2 ** (8 - bits)
    return (images / step).floor() * step


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert the values that are not below the threshold."""
    return torch.where(images < thresholds, images, 255 - images)


def autocontrast(images: Tensor) -> Tensor:
    """Stretch each channel to 0 ... 255; one of a single value stays."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    scale = 255 / (high - low).clamp(min=1)
    return torch.where(high > low, ((images - low) * scale + 1e-3).floor().clamp(0, 255), images)


def equalize(images: Tensor) -> Tensor:
    """Map each channel's values so that all are about equally frequent, with Pillow's integer arithmetic."""
    values = images.long().flatten(2)
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.int64, device=images.device)
    counts.scatter_add_(2, values, torch.ones_like(values))
    last = counts.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - last) // 255
    before = counts.cumsum(2) - counts
    table = ((before + step // 2) // step.clamp(min=1)).clamp(max=255)
    return torch.where(step[..., None] > 0, table.gather(2, values).view(images.shape).float(), images)
