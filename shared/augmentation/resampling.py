"""Crop and resize of whole batches on any device, as Pillow does it one image at a time: two matrix products.

Images are stored as squares of one size, whatever their shape was; a crop is a box in shares of the original's width
and height, so it means the same whatever the size of the square.
"""

from functools import cache

import torch
from torch import Tensor


def linear(x: Tensor) -> Tensor:
    """Pillow's BILINEAR: a triangle."""
    return (1 - x.abs()).clamp_(min=0)


def cubic(x: Tensor) -> Tensor:
    """Pillow's BICUBIC: Keys' kernel with a = -0.5."""
    x = x.abs()
    inner = (1.5 * x - 2.5) * x * x + 1
    outer = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, inner, torch.where(x < 2, outer, torch.zeros_like(x)))


FILTERS = {"bilinear": linear, "bicubic": cubic}


def weights(low: Tensor, high: Tensor, source: int, target: int, interpolation: str) -> Tensor:
    """Weights of `source` pixels in each of `target` pixels that cover low ... high: float32 [..., target, source].

    Args:
        low, high: [...], ends of an interval of 0 ... 1; low > high mirrors it.
        source, target: pixels of the whole 0 ... 1, and of the interval.
        interpolation: "bilinear" or "bicubic", widened where pixels are joined, as Pillow's `resize` does.
    """
    kernel = FILTERS[interpolation]
    step = (high - low) * source / target  # source pixels per target pixel
    centers = low[..., None] * source + torch.arange(0.5, target, device=low.device) * step[..., None]
    pixels = torch.arange(0.5, source, device=low.device)
    found = kernel((pixels - centers[..., None]).div_(step.abs().clamp_(min=1.0)[..., None, None]))
    return found.div_(found.sum(-1, keepdim=True))


def crop_and_resize(images: Tensor, boxes: Tensor, size: int, interpolation: str = "bilinear") -> Tensor:
    """Cut a box out of each image and scale it to `size`: [rows, S, S, 3] uint8 -> [rows, 3, size, size], 0 ... 255.

    Args:
        images: [rows, S, S, channels].
        boxes: float32 [rows, 4], or [1, 4] for all: left, top, right, bottom in shares of the image; left > right
            mirrors it.
        size: side of the result.
        interpolation: "bilinear" or "bicubic".

    Returns:
        float32, rounded to whole numbers within 0 ... 255, as Pillow's pixels are.
    """
    rows, side, _, channels = images.shape
    across, down = weights(boxes[:, :2], boxes[:, 2:], side, size, interpolation).unbind(1)
    lines = images.permute(0, 3, 1, 2).reshape(rows, channels * side, side).float()
    wide = (lines @ across.transpose(1, 2)).round_().clamp_(0, 255)  # Pillow, too, keeps bytes in between
    return (down[:, None] @ wide.view(rows, channels, side, size)).round_().clamp_(0, 255)


@cache
def whole(device: torch.device) -> Tensor:
    """The box of all of an image, for all images: [1, 4], made once."""
    return torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=device)


def center_boxes(aspects: Tensor, share: float | None) -> Tensor:
    """Boxes [rows, 4], or [1, 4] for all, of the square in the middle whose side is `share` of the image's shorter one.

    Args:
        aspects: float32 [rows], width over height.
        share: 0.875 is resize to 256 and crop to 224; None is the whole image.
    """
    if share is None:
        return whole(aspects.device)
    wide, high = share / aspects.clamp(min=1), share * aspects.clamp(max=1)
    return torch.stack([0.5 - wide / 2, 0.5 - high / 2, 0.5 + wide / 2, 0.5 + high / 2], dim=1)
