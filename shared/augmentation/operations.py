"""Pillow's resize, ImageEnhance and ImageOps for whole batches on any device, and a random one of them for each image.

Images are float32 [rows, 3, height, width], integers 0 ... 255. Factors and thresholds are float32 [rows, 1, 1, 1], one
per image. TrivialAugment (Müller and Hutter 2021) and RandAugment (Cubuk et al. 2019) choose among the same operations;
their ranges of strength are torchvision's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shared.models.linear_layers import without_tf32

Numbers = NDArray[np.float64]  # [rows], on the CPU

GREY = np.array([0.299, 0.587, 0.114])[:, None, None]
SMOOTH = np.array([[1.0, 1.0, 1.0], [1.0, 5.0, 1.0], [1.0, 1.0, 1.0]])


def to(device: torch.device, values: NDArray[Any]) -> Tensor:
    """Copy numbers to the device, fractions as float32; to a GPU from pinned memory: only such copies do not wait."""
    tensor = torch.from_numpy(values.astype(np.float32) if values.dtype.kind == "f" else values)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def cubic(x: Tensor) -> Tensor:
    """Pillow's BICUBIC kernel: Keys' cubic with a = -0.5."""
    x = x.abs()
    inner = (1.5 * x - 2.5) * x * x + 1
    outer = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, inner, torch.where(x < 2, outer, torch.zeros_like(x)))


FILTERS: dict[str, Callable[[Tensor], Tensor]] = {"bilinear": lambda x: (1 - x.abs()).clamp_(min=0), "bicubic": cubic}


def weights(low: Tensor, high: Tensor, source: int, target: int, interpolation: str) -> Tensor:
    """The weight of each source pixel in each target pixel: float32 [..., target, source].

    Args:
        low, high: [...], the ends of the cropped interval, as shares 0 ... 1 of the source; low > high mirrors it.
        source: number of pixels of the whole source.
        target: number of pixels of the result, which covers the interval.
        interpolation: "bilinear" or "bicubic"; the kernel is widened when downscaling, as in Pillow's `resize`.
    """
    kernel = FILTERS[interpolation]
    step = (high - low) * source / target  # source pixels per target pixel
    centers = low[..., None] * source + torch.arange(0.5, target, device=low.device) * step[..., None]
    pixels = torch.arange(0.5, source, device=low.device)
    found = kernel((pixels - centers[..., None]).div_(step.abs().clamp_(min=1.0)[..., None, None]))
    return found.div_(found.sum(-1, keepdim=True))


@without_tf32()
def crop_and_resize(images: Tensor, boxes: Tensor, size: int, interpolation: str = "bilinear") -> Tensor:
    """Cut a box out of each image and scale it to `size`: [rows, S, S, 3] uint8 -> [rows, 3, size, size], 0 ... 255.

    Two matrix products do this. A box does not depend on the size of the squares in which the images are stored.

    Args:
        images: uint8 [rows, S, S, channels].
        boxes: float32 [rows, 4], or [1, 4] for all images: left, top, right, bottom as shares of the image;
            left > right mirrors it.
        size: side of the result.
        interpolation: "bilinear" or "bicubic".

    Returns:
        float32, rounded to integers in 0 ... 255 like Pillow's pixels.
    """
    rows, side, _, channels = images.shape
    across, down = weights(boxes[:, :2], boxes[:, 2:], side, size, interpolation).unbind(1)
    lines = images.permute(0, 3, 1, 2).reshape(rows, channels * side, side).float()
    wide = (lines @ across.transpose(1, 2)).round_().clamp_(0, 255)  # Pillow also rounds between the two passes
    return (down[:, None] @ wide.view(rows, channels, side, size)).round_().clamp_(0, 255)


def grey(images: Tensor) -> Tensor:
    """Luminance [rows, 1, height, width], rounded like Pillow's convert("L")."""
    return (images * to(images.device, GREY)).sum(1, keepdim=True).add(0.5).floor()


def smooth(images: Tensor) -> Tensor:
    """The images smoothed by a 3 x 3 kernel, except their borders."""
    kernel = to(images.device, SMOOTH).div(13).expand(3, 1, 3, 3)
    result = images.clone()
    result[:, :, 1:-1, 1:-1] = F.conv2d(images, kernel, groups=3).add(0.5).floor()
    return result


# What Pillow's ImageEnhance makes of an image at factor 0.
ENHANCE: dict[str, Callable[[Tensor], Tensor]] = {
    "brightness": torch.zeros_like,
    "saturation": grey,
    "contrast": lambda images: grey(images).mean((1, 2, 3), keepdim=True).add(0.5).floor(),  # the mean luminance
    "sharpness": smooth,
}


def enhance(images: Tensor, name: str, factors: Tensor) -> Tensor:
    """Interpolate between `ENHANCE[name]` (factor 0) and the image (1); larger factors extrapolate."""
    other = ENHANCE[name](images)
    return (other + factors * (images - other)).clamp(0, 255).floor()


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


@dataclass(frozen=True)
class Space:
    """The largest strength of each operation."""

    shear: float
    shift: float  # in pixels
    shift_share: float  # as a share of the side, added to `shift`
    turn: float  # in degrees
    change: float  # of brightness, color, contrast, sharpness: the factor of the image is 1 - change ... 1 + change
    bits: int  # removed by posterize


LEVELS = 31  # number of strengths, from none to the maximum
WIDE = Space(0.99, 32.0, 0.0, 135.0, 0.99, 6)  # of TrivialAugment
USUAL = Space(0.3, 0.0, 150 / 331, 30.0, 0.9, 4)  # of RandAugment
GEOMETRY = ("shear x", "shear y", "translate x", "translate y", "rotate")
OPERATIONS = ("identity", *GEOMETRY, *ENHANCE, "posterize", "solarize", "autocontrast", "equalize")


def change_at_random(images: Tensor, operation: Numbers, level: Numbers | int, sign: Numbers, space: Space) -> Tensor:
    """Change each image by one random operation; pixels from outside the image are black.

    Args:
        images: float32 [rows, 3, size, size], integers 0 ... 255.
        operation, sign: draws from [0, 1).
        level: strength, 0 ... LEVELS - 1, of each image or of all.
        space: `WIDE` for TrivialAugment, `USUAL` for RandAugment.
    """
    chosen = (operation * len(OPERATIONS)).astype(int)
    strengths = np.broadcast_to(level / (LEVELS - 1), chosen.shape)
    signed = np.where(sign < 0.5, strengths, -strengths)
    result = images.clone()
    for name in np.unique(chosen):
        rows = np.flatnonzero(chosen == name)
        at = to(images.device, rows)
        result[at] = change(images[at], OPERATIONS[name], strengths[rows], signed[rows], space)
    return result


def change(images: Tensor, name: str, strengths: Numbers, signed: Numbers, space: Space) -> Tensor:
    """Apply one operation to all images: `strengths` in 0 ... 1, and `signed`, the same with a sign."""

    def each(values: Numbers) -> Tensor:
        return to(images.device, values)[:, None, None, None]

    if name in GEOMETRY:
        return affine(images, inverse(name, signed, images.shape[-1], space))
    if name in ENHANCE:
        return enhance(images, name, each(1 + space.change * signed))
    if name == "posterize":
        return posterize(images, each(8 - np.round(space.bits * strengths)))
    if name == "solarize":
        return solarize(images, each(255 * (1 - strengths)))
    if name == "autocontrast":
        return autocontrast(images)
    return equalize(images) if name == "equalize" else images


def inverse(name: str, signed: Numbers, size: int, space: Space) -> NDArray[np.float64]:
    """Matrices [rows, 2, 3] that map a pixel (x, y) of the result to its source, as in Pillow's `transform`.

    Shears fix the upper left corner, rotations fix the center.
    """
    found = np.tile(np.eye(2, 3), (len(signed), 1, 1))
    if name.startswith("shear"):
        found[:, *((0, 1) if name == "shear x" else (1, 0))] = space.shear * signed
    elif name.startswith("translate"):
        found[:, 0 if name == "translate x" else 1, 2] = (space.shift + space.shift_share * size) * signed
    else:
        angle, middle = space.turn * signed * math.pi / 180, size / 2
        cos, sin = np.cos(angle), np.sin(angle)
        found[:, 0] = np.stack([cos, -sin, middle - cos * middle + sin * middle], 1)
        found[:, 1] = np.stack([sin, cos, middle - sin * middle - cos * middle], 1)
    return found


@without_tf32()  # `affine_grid` is a matrix product
def affine(images: Tensor, matrices: NDArray[np.float64]) -> Tensor:
    """Sample the nearest pixel at the source given by `matrices` [rows, 2, 3]; 0 outside the image."""
    # torch's coordinates run from -1 to 1: x = (u + 1) * size / 2.
    size = images.shape[-1]
    scaled = matrices.copy()
    scaled[:, :, 2] = matrices[:, :, 2] * 2 / size + matrices[:, :, :2].sum(2) - 1
    grid = F.affine_grid(to(images.device, scaled), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)
