"""Images per second and core: Pillow's decoding, the uint8 cache, and each with augmentation as the recipe does it.

    python benchmarks/loading.py --output_dir out/loading

On JPEGs of 500 x 375 pixels made here, in one thread of one process; the contestants take turns, and each figure is the
median of the rounds. Leaves loading_cpu.json in the output folder. Pages of the cache are in memory after the first
round: it is memory speed that is measured, as in every epoch but the first of data that fit.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from shared.augmentation.augmentation import Augmentation  # noqa: E402
from shared.augmentation.geometry import Geometry  # noqa: E402
from shared.images.images import Images, collate, prepare  # noqa: E402
from shared.images.sources import Source, class_folders  # noqa: E402
from shared.models.image_models import IMAGENET_MEAN, IMAGENET_STD  # noqa: E402
from shared.plan.batches import Plan  # noqa: E402

WIDTH, HEIGHT = 500, 375
BATCH = 32


def write_photos(folder: Path, count: int) -> None:
    """JPEGs with the detail, and so about the size in bytes, of photographs: noise of all scales, in two classes."""
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


def contestants(source: Source, size: int) -> dict[str, Callable[[], None]]:
    """By name a function that reads every image of the source once."""
    plain = prepare(source, SimpleNamespace(cache="none", skip_corrupt_images=False), size)
    cached = prepare(source, SimpleNamespace(cache="uint8", skip_corrupt_images=False), size)
    geometry = Geometry(size - size // 8, size, IMAGENET_MEAN, IMAGENET_STD, "bilinear")
    augmentation = Augmentation(0, geometry, min_crop_area=0.08, horizontal_flip=True)
    plan = Plan(num_samples=len(source), seed=0, global_batch_size=BATCH, num_epochs=1)

    def read(images: Images, augment: bool) -> None:
        for step in range(plan.total_steps):
            (micro_batch,) = plan.micro_batches(step)
            batch = collate(images.read_micro_batch(micro_batch.samples, micro_batch.epochs))
            if augment:
                augmentation.training(micro_batch, batch, 2)

    return {
        "decoded by Pillow": lambda: read(plain, False),
        "uint8 cache": lambda: read(cached, False),
        "decoded, and augmented on the CPU": lambda: read(plain, True),
        "uint8 cache, and augmented on the CPU": lambda: read(cached, True),
    }


def main() -> None:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of photographs, cache and result")
    parser.add_argument("--images", type=int, default=256, help="JPEGs (default: %(default)s)")
    parser.add_argument("--size", type=int, default=256, help="side of the stored squares (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant (default: %(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["ACCELERATE_RECIPES_CACHE"] = str(given.output_dir / "cache")
    if not (given.output_dir / "photos").is_dir():
        write_photos(given.output_dir / "photos", given.images)
    source = class_folders(str(given.output_dir / "photos"), "--train_dir")
    rates: dict[str, list[float]] = {}
    for round_number in range(given.rounds + 1):
        for name, read in contestants(source, given.size).items():
            started = time.process_time()
            read()
            if round_number:  # the first one warms up
                rates.setdefault(name, []).append(len(source) / (time.process_time() - started))
    report = {name: {"median": statistics.median(found), "all": found} for name, found in rates.items()}
    size = sum(path.stat().st_size for path in source.paths) / len(source)
    report |= {"settings": {"images": len(source), "size": given.size, "jpeg_bytes": round(size)}}
    (given.output_dir / "loading_cpu.json").write_text(json.dumps(report, indent=1))
    print("| read | images per second and core, median (min-max) |\n|---|---:|")
    for name, found in rates.items():
        print(f"| {name} | {statistics.median(found):,.0f} ({min(found):,.0f}-{max(found):,.0f}) |")
    ratios = [cache / pillow for cache, pillow in zip(rates["uint8 cache"], rates["decoded by Pillow"], strict=True)]
    print(f"the cache over Pillow: {statistics.median(ratios):.1f} ({min(ratios):.1f}-{max(ratios):.1f})")


if __name__ == "__main__":
    main()
