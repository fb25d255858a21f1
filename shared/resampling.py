"""Crop and resize of whole batches on any device, as Pillow does it one image at a time: two matrix products.

Images are stored as squares of one size, whatever their shape was; a crop is a box in shares of the original's width
and height, so it means the same whatever the size of the square.
"""

import torch
from torch import Tensor

from shared.transfer import constant


def linear(x: Tensor) -> Tensor:
    """Pillow's BILINEAR: a triangle."""
    return (1 - x.abs()).clamp(min=0)


def cubic(x: Tensor) -> Tensor:
    """Pillow's BICUBIC: Keys' kernel with a = -0.5."""
    x = x.abs()
    inner = (1.5 * x - 2.5) * x * x + 1
    outer = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, inner, torch.where(x < 2, outer, torch.zeros_like(x)))


FILTERS = {"bilinear": linear, "bicubic": cubic}


def weights(low: Tensor, high: Tensor, source: int, target: int, interpolation: str) -> Tensor:
    """Weights of `source` pixels in each of `target` pixels that cover low ... high: float32 [rows, target, source].

    Args:
        low, high: [rows], ends of an interval of 0 ... 1; low > high mirrors it.
        source, target: pixels of the whole 0 ... 1, and of the interval.
        interpolation: "bilinear" or "bicubic", widened where pixels are joined, as Pillow's `resize` does.
    """
    kernel = FILTERS[interpolation]
    step = (high - low) * source / target  # source pixels per target pixel
    centers = low[:, None] * source + (torch.arange(target, device=low.device) + 0.5) * step[:, None]
    pixels = torch.arange(source, device=low.device) + 0.5
    found = kernel((pixels - centers[:, :, None]) / step.abs().clamp(min=1.0)[:, None, None])
    return found / found.sum(2, keepdim=True)


def crop_and_resize(images: Tensor, boxes: Tensor, size: int, interpolation: str = "bilinear") -> Tensor:
    """Cut a box out of each image and scale it to `size`: [rows, S, S, 3] uint8 -> [rows, 3, size, size], 0 ... 255.

    Args:
        images: [rows, height, width, channels].
        boxes: float32 [rows, 4], left, top, right, bottom in shares of the image; left > right mirrors it.
        size: side of the result.
        interpolation: "bilinear" or "bicubic".

    Returns:
        float32, rounded to whole numbers within 0 ... 255, as Pillow's pixels are.
    """
    left, top, right, bottom = boxes.unbind(1)
    down = weights(top, bottom, images.shape[1], size, interpolation)
    across = weights(left, right, images.shape[2], size, interpolation)
    pixels = images.permute(0, 3, 1, 2).float()  # [rows, channels, height, width]
    wide = (pixels @ across[:, None].transpose(2, 3)).round_().clamp_(0, 255)  # Pillow, too, keeps bytes in between
    return (down[:, None] @ wide).round_().clamp_(0, 255)


def center_boxes(aspects: Tensor, share: float | None) -> Tensor:
    """Boxes [rows, 4] of the square in the middle whose side is `share` of the image's shorter one.

    Args:
        aspects: float32 [rows], width over height.
        share: 0.875 is resize to 256 and crop to 224; None is the whole image.
    """
    if share is None:
        return constant([0.0, 0.0, 1.0, 1.0], aspects).expand(len(aspects), 4)
    wide, high = share / aspects.clamp(min=1), share * aspects.clamp(max=1)
    return torch.stack([0.5 - wide / 2, 0.5 - high / 2, 0.5 + wide / 2, 0.5 + high / 2], dim=1)
