"""TrivialAugment (Müller and Hutter 2021) and RandAugment (Cubuk et al. 2019) for whole batches.

Each image gets its own operations. Both draw from the same ones; the strongest of each differ, as torchvision has them.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shared.augmentation import color
from shared.plan.device_transfer import to_device

LEVELS = 31  # strengths, from nothing to the most


@dataclass(frozen=True)
class Space:
    """The most that each operation does."""

    shear: float
    shift: float  # in pixels,
    shift_share: float  # and in shares of the side
    turn: float  # in degrees
    change: float  # of brightness, color, contrast, sharpness: 1 is black, grey, flat, smooth, and as far the other way
    bits: int  # that posterize takes away


WIDE = Space(0.99, 32.0, 0.0, 135.0, 0.99, 6)  # of TrivialAugment
USUAL = Space(0.3, 0.0, 150 / 331, 30.0, 0.9, 4)  # of RandAugment
GEOMETRY = ("shear x", "shear y", "translate x", "translate y", "rotate")
ENHANCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": color.brightness,
    "color": color.saturation,
    "contrast": color.contrast,
    "sharpness": color.sharpness,
}
OPERATIONS = ("identity", *GEOMETRY, *ENHANCE, "posterize", "solarize", "autocontrast", "equalize")


def trivial(
    images: Tensor, operation: NDArray[np.float64], magnitude: NDArray[np.float64], sign: NDArray[np.float64]
) -> Tensor:
    """One operation on each image, of the strength drawn for it.

    Args:
        images: float32 [rows, 3, size, size] of whole numbers 0 ... 255.
        operation, magnitude, sign: [rows] draws from [0, 1).
    """
    return apply(images, operation, np.floor(magnitude * LEVELS) / (LEVELS - 1), sign, WIDE)


def rand(images: Tensor, operation: NDArray[np.float64], magnitude: int, sign: NDArray[np.float64]) -> Tensor:
    """One of RandAugment's operations on each image, of strength `magnitude` of 0 ... 30; arguments as above."""
    return apply(images, operation, np.full(len(images), magnitude / (LEVELS - 1)), sign, USUAL)


def apply(
    images: Tensor,
    operation: NDArray[np.float64],
    strengths: NDArray[np.float64],
    sign: NDArray[np.float64],
    space: Space,
) -> Tensor:
    """Change each image by the operation drawn for it, of `strengths` [rows]; what leaves the picture is black."""
    chosen = (operation * len(OPERATIONS)).astype(int)
    signed = np.where(sign < 0.5, strengths, -strengths)
    result = images.clone()
    for name in np.unique(chosen):
        rows = np.flatnonzero(chosen == name)
        at = to_device(torch.from_numpy(rows), images.device)
        result[at] = change(images[at], OPERATIONS[name], strengths[rows], signed[rows], space)
    return result


def change(
    images: Tensor, name: str, strengths: NDArray[np.float64], signed: NDArray[np.float64], space: Space
) -> Tensor:
    """One operation on all images: `strengths` [rows] of 0 ... 1, and the same with a sign."""

    def each(values: NDArray[np.float64]) -> Tensor:
        return to_device(torch.from_numpy(values.astype(np.float32)), images.device)[:, None, None, None]

    if name in GEOMETRY:
        return affine(images, inverse(name, signed, images.shape[-1], space))
    if name in ENHANCE:
        return ENHANCE[name](images, each(1 + space.change * signed))
    if name == "posterize":
        return color.posterize(images, each(8 - np.round(space.bits * strengths)))
    if name == "solarize":
        return color.solarize(images, each(255 * (1 - strengths)))
    if name == "autocontrast":
        return color.autocontrast(images)
    return color.equalize(images) if name == "equalize" else images


def inverse(name: str, signed: NDArray[np.float64], size: int, space: Space) -> NDArray[np.float64]:
    """Where (x, y) of the result comes from: matrices [rows, 2, 3], in pixels, as Pillow's `transform` takes them.

    Shears leave the upper left corner where it is, a rotation the middle.
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


def affine(images: Tensor, matrices: NDArray[np.float64]) -> Tensor:
    """The nearest pixel at the place that `inverse` gives; 0 outside."""
    # torch's places run from -1 to 1: x = (u + 1) * size / 2.
    size = images.shape[-1]
    scaled = matrices.copy()
    scaled[:, :, 2] = matrices[:, :, 2] * 2 / size + matrices[:, :, :2].sum(2) - 1
    theta = to_device(torch.from_numpy(scaled.astype(np.float32)), images.device)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)
