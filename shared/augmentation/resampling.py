"""Crop and resize whole batches on any device by two matrix products, with the results of Pillow.

All images are stored as squares of one size. A crop is a box in shares of the original width and height, so it does not
depend on the size of the square.
"""

import torch
from torch import Tensor

from shared.processes.starting import without_tf32


def linear(x: Tensor) -> Tensor:
    """Pillow's BILINEAR kernel: a triangle."""
    return (1 - x.abs()).clamp_(min=0)


def cubic(x: Tensor) -> Tensor:
    """Pillow's BICUBIC kernel: Keys' cubic with a = -0.5."""
    x = x.abs()
    inner = (1.5 * x - 2.5) * x * x + 1
    outer = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, inner, torch.where(x < 2, outer, torch.zeros_like(x)))


FILTERS = {"bilinear": linear, "bicubic": cubic}


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
