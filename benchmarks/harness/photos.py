"""JPEGs of photographs' size and detail, made from noise."""

from pathlib import Path

import numpy as np

WIDTH, HEIGHT = 500, 375


def write_photos(folder: Path, count: int, different: int) -> None:
    """Write JPEGs into the folders of two classes.

    They are noise at several scales, so that they have the detail of photographs and about their size in bytes.

    Args:
        folder: where to.
        count: number of files; if it is larger than `different`, a multiple of it.
        different: so many files differ; the others are hard links to them.
    """
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(min(count, different)):
        total = np.zeros((HEIGHT, WIDTH, 3), np.float32)
        for scale in (1, 4, 16, 64):
            small = rng.integers(0, 256, (HEIGHT // scale + 1, WIDTH // scale + 1, 3), dtype=np.uint8)
            layer = Image.fromarray(small).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
            total += np.asarray(layer, np.float32) * scale / 85
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(total.clip(0, 255).astype(np.uint8)).save(folder / "ab"[i % 2] / f"{i:04d}.jpg", quality=87)
    for photo in sorted(folder.rglob("*.jpg")):
        for copy in range(count // different - 1):
            photo.with_stem(f"{photo.stem}-{copy}").hardlink_to(photo)
