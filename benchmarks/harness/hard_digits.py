"""Digits that are hard to read: 32 x 32 pixels, shifted, turned, scaled and noised, made from scikit-learn's digits."""

import datasets
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

SIDE = 32
HELD_OUT = 450  # of the 1,797 digits: no digit is in both parts
COPIES = 4.5  # images per digit
TURN, SCALE = 40, (1.5, 2.8)  # degrees to each side, pixels per pixel of the digit
SHIFT, NOISE = 9.0, 45.0  # pixels, standard deviation in 0 ... 255


def tables(seed: int = 0) -> list[pa.Table]:
    """Training and validation images as tables of PNG bytes and labels."""
    encode = datasets.Image().encode_example
    return [pa.table({"image": [*map(encode, images)], "label": [*map(str, labels)]}) for images, labels in draw(seed)]


def draw(seed: int = 0) -> list[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Training and validation images [n, SIDE, SIDE] and their labels [n]; functions of the seed."""
    from sklearn.datasets import load_digits

    digits, rng = load_digits(), np.random.default_rng(seed)
    order = rng.permutation(len(digits.images))
    found = []
    for part in (order[HELD_OUT:], order[:HELD_OUT]):
        chosen = np.resize(part, round(COPIES * len(part)))
        found.append((np.stack([spoiled(digits.images[i], rng) for i in chosen]), digits.target[chosen]))
    return found


def spoiled(digit: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.uint8]:
    """A digit, [8, 8] of 0 ... 16, at a random place, angle and size, with a random contrast and noise."""
    angle, scale = np.radians(rng.uniform(-TURN, TURN)), rng.uniform(*SCALE)
    across, down = SIDE / 2 + rng.uniform(-SHIFT / 2, SHIFT / 2, 2)
    cos, sin = np.cos(angle) / scale, np.sin(angle) / scale
    back = (cos, sin, 4 - cos * across - sin * down, -sin, cos, 4 + sin * across - cos * down)
    picture = Image.fromarray((digit * 15.9).astype(np.uint8))
    turned = np.asarray(picture.transform((SIDE, SIDE), Image.Transform.AFFINE, back, Image.Resampling.BILINEAR))
    noised = rng.uniform(0.5, 1) * turned + rng.uniform(0, 60) + rng.normal(0, NOISE, turned.shape)
    return noised.clip(0, 255).astype(np.uint8)
