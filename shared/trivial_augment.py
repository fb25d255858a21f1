"""TrivialAugment (Müller and Hutter 2021) for whole batches: one operation of one strength for each image."""

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shared import color
from shared.transfer import to_device

LEVELS = 31  # strengths, from nothing to the most
MOST_SHEAR, MOST_SHIFT, MOST_TURN, MOST_CHANGE = 0.99, 32.0, 135.0, 0.99  # the paper's "wide" space; shift in pixels
GEOMETRY = ("shear x", "shear y", "translate x", "translate y", "rotate")
ENHANCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "brightness": color.brightness,
    "color": color.saturation,
    "contrast": color.contrast,
    "sharpness": color.sharpness,
}
OPERATIONS = ("identity", *GEOMETRY, *ENHANCE, "posterize", "solarize", "autocontrast", "equalize")


def apply(
    images: Tensor, operation: NDArray[np.float64], magnitude: NDArray[np.float64], sign: NDArray[np.float64]
) -> Tensor:
    """Change each image by the operation and the strength drawn for it; what leaves the picture is black behind it.

    Args:
        images: float32 [rows, 3, size, size] of whole numbers 0 ... 255.
        operation, magnitude, sign: [rows] draws from [0, 1).
    """
    chosen = (operation * len(OPERATIONS)).astype(int)
    strengths = np.floor(magnitude * LEVELS) / (LEVELS - 1)
    signed = np.where(sign < 0.5, strengths, -strengths)
    result = images.clone()
    for name in np.unique(chosen):
        rows = np.flatnonzero(chosen == name)
        at = to_device(torch.from_numpy(rows), images.device)
        result[at] = change(images[at], OPERATIONS[name], strengths[rows], signed[rows])
    return result


def change(images: Tensor, name: str, strengths: NDArray[np.float64], signed: NDArray[np.float64]) -> Tensor:
    """One operation on all images: `strengths` [rows] of 0 ... 1, and the same with a sign."""

    def each(values: NDArray[np.float64]) -> Tensor:
        return to_device(torch.from_numpy(values.astype(np.float32)), images.device)[:, None, None, None]

    if name in GEOMETRY:
        return affine(images, inverse(name, signed, images.shape[-1]))
    if name in ENHANCE:
        return ENHANCE[name](images, each(1 + MOST_CHANGE * signed))
    if name == "posterize":
        return color.posterize(images, each(8 - np.round(6 * strengths)))
    if name == "solarize":
        return color.solarize(images, each(255 * (1 - strengths)))
    if name == "autocontrast":
        return color.autocontrast(images)
    return color.equalize(images) if name == "equalize" else images


def inverse(name: str, signed: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Where (x, y) of the result comes from: matrices [rows, 2, 3], in pixels, as Pillow's `transform` takes them.

    Shears leave the upper left corner where it is, a rotation the middle.
    """
    found = np.tile(np.eye(2, 3), (len(signed), 1, 1))
    if name.startswith("shear"):
        found[:, *((0, 1) if name == "shear x" else (1, 0))] = MOST_SHEAR * signed
    elif name.startswith("translate"):
        found[:, 0 if name == "translate x" else 1, 2] = MOST_SHIFT * signed
    else:
        angle, middle = MOST_TURN * signed * math.pi / 180, size / 2
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
