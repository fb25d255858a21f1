"""Measure how many images per second a core reads: decoded by Pillow, from the uint8 cache, each with augmentation.

    python benchmarks/image_loading.py --output_dir out/image_loading

The script makes JPEGs of 500 x 375 pixels and reads them in one thread of one process. The contestants take turns, and
each figure is the median of the rounds. After the first round the pages of the cache are in memory, so the figures hold
for data that fit into memory, from the second epoch on. Writes image_loading.json into the output folder.
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

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.harness.photos import write_photos
from shared.augmentation.augmentation import Augmentation
from shared.images.decoding import Square
from shared.images.geometry import Geometry
from shared.images.images import Images, ImagesOnGPU, collate, prepare
from shared.images.sources import Source, class_folders
from shared.models.image_models import IMAGENET_MEAN, IMAGENET_STD
from shared.plan.batches import Plan

BATCH = 32


def contestants(source: Source, size: int) -> dict[str, Callable[[], None]]:
    """Functions that read every image of the source once, by name."""
    plain = prepare(source, SimpleNamespace(cache="none", skip_corrupt_images=False), Square(size))
    cached = prepare(source, SimpleNamespace(cache="uint8", skip_corrupt_images=False), Square(size))
    geometry = Geometry(size - size // 8, size, IMAGENET_MEAN, IMAGENET_STD, "bilinear")
    augmentation = Augmentation(0, geometry, min_crop_area=0.08, horizontal_flip=True)
    plan = Plan(num_samples=len(source), seed=0, global_batch_size=BATCH, num_epochs=1)

    def read(images: Images, augment: bool) -> None:
        for step in range(plan.total_steps):
            (micro_batch,) = plan.micro_batches(step)
            batch = collate(images.read_micro_batch(micro_batch.samples, micro_batch.epochs))
            if augment:
                augmentation.training(micro_batch, batch)

    return {
        "decoded by Pillow": lambda: read(plain, False),
        "uint8 cache": lambda: read(cached, False),
        "read for the GPU, not decoded": lambda: read(ImagesOnGPU(source, Square(size)), False),
        "decoded, and augmented on the CPU": lambda: read(plain, True),
        "uint8 cache, and augmented on the CPU": lambda: read(cached, True),
    }


def main() -> None:
    """Measure, print a table and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for photographs, cache and result")
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
            if round_number:  # the first round warms up
                rates.setdefault(name, []).append(len(source) / (time.process_time() - started))
    report = {name: {"median": statistics.median(found), "all": found} for name, found in rates.items()}
    size = sum(path.stat().st_size for path in source.paths or ()) / len(source)
    report |= {"settings": {"images": len(source), "size": given.size, "jpeg_bytes": round(size)}}
    (given.output_dir / "image_loading.json").write_text(json.dumps(report, indent=1))
    print("| read | images per second and core, median (min-max) |\n|---|---:|")
    for name, found in rates.items():
        print(f"| {name} | {statistics.median(found):,.0f} ({min(found):,.0f}-{max(found):,.0f}) |")
    ratios = [cache / pillow for cache, pillow in zip(rates["uint8 cache"], rates["decoded by Pillow"], strict=True)]
    print(f"cache / Pillow: {statistics.median(ratios):.1f} ({min(ratios):.1f}-{max(ratios):.1f})")


if __name__ == "__main__":
    main()
