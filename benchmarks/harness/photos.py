"""JPEGs of photographs' size and detail, made from noise."""

from pathlib import Path

import numpy as np

WIDTH, HEIGHT = 500, 375


def write_photos(folder: Path, count: int) -> None:
    """Write `count` JPEGs into the folders of two classes.

    They are noise at several scales, so that they have the detail of photographs and about their size in bytes.
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(count):
        total = np.zeros((HEIGHT, WIDTH, 3), np.float32)
        for scale in (1, 4, 16, 64):
            small = rng.integers(0, 256, (HEIGHT // scale + 1, WIDTH // scale + 1, 3), dtype=np.uint8)
            layer = Image.fromarray(small).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
            total += np.asarray(layer, np.float32) * scale / 85
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(total.clip(0, 255).astype(np.uint8)).save(folder / "ab"[i % 2] / f"{i:04d}.jpg", quality=87)
