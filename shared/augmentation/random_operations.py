"""TrivialAugment (Müller and Hutter 2021) and RandAugment (Cubuk et al. 2019) for whole batches.

Each image gets its own operation. Both methods use the same operations; their ranges of strength are torchvision's.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shared.augmentation import color
from shared.augmentation.color import to

LEVELS = 31  # number of strengths, from none to the maximum

Numbers = NDArray[np.float64]  # [rows], on the CPU


@dataclass(frozen=True)
class Space:
    """The largest strength of each operation."""

    shear: float
    shift: float  # in pixels
    shift_share: float  # as a share of the side, added to `shift`
    turn: float  # in degrees
    change: float  # of brightness, color, contrast, sharpness: the factor of the image is 1 - change ... 1 + change
    bits: int  # removed by posterize


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


def trivial(images: Tensor, operation: Numbers, magnitude: Numbers, sign: Numbers) -> Tensor:
    """TrivialAugment: change each image by one random operation of random strength.

    Args:
        images: float32 [rows, 3, size, size], integers 0 ... 255.
        operation, magnitude, sign: draws from [0, 1).
    """
    return apply(images, operation, np.floor(magnitude * LEVELS) / (LEVELS - 1), sign, WIDE)


def rand(images: Tensor, operation: Numbers, magnitude: int, sign: Numbers) -> Tensor:
    """One step of RandAugment: as `trivial`, but every image gets the same strength `magnitude`, 0 ... 30."""
    return apply(images, operation, np.full(len(images), magnitude / (LEVELS - 1)), sign, USUAL)


def apply(images: Tensor, operation: Numbers, strengths: Numbers, sign: Numbers, space: Space) -> Tensor:
    """Change each image by its operation with its strength; pixels from outside the image are black."""
    chosen = (operation * len(OPERATIONS)).astype(int)
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
        return ENHANCE[name](images, each(1 + space.change * signed))
    if name == "posterize":
        return color.posterize(images, each(8 - np.round(space.bits * strengths)))
    if name == "solarize":
        return color.solarize(images, each(255 * (1 - strengths)))
    if name == "autocontrast":
        return color.autocontrast(images)
    return color.equalize(images) if name == "equalize" else images


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


def affine(images: Tensor, matrices: NDArray[np.float64]) -> Tensor:
    """Sample the nearest pixel at the source given by `matrices` [rows, 2, 3]; 0 outside the image."""
    # torch's coordinates run from -1 to 1: x = (u + 1) * size / 2.
    size = images.shape[-1]
    scaled = matrices.copy()
    scaled[:, :, 2] = matrices[:, :, 2] * 2 / size + matrices[:, :, :2].sum(2) - 1
    grid = F.affine_grid(to(images.device, scaled), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)
