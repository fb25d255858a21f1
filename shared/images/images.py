"""The training and validation images of a run, decoded when they are read or taken from the cache, and batches."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from shared.cache.prepared import each_share, shared_array
from shared.datasets.labels import ProblemType
from shared.errors import UserError, say
from shared.images import cache
from shared.images.decoding import Geometry, Square
from shared.images.sources import Images, blocks, load_sources


def collate(items: Any) -> dict[str, torch.Tensor]:
    """Make a batch: images uint8 [rows, side, side, 3], aspects float32 [rows], labels int64 or float64 [rows]."""
    pixels, aspects, targets = items if isinstance(items, tuple) else zip(*items, strict=True)
    return {
        "images": torch.from_numpy(np.stack(pixels) if isinstance(pixels, tuple) else pixels),
        "aspects": torch.from_numpy(np.asarray(aspects, np.float32)),
        "labels": torch.from_numpy(np.asarray(targets)),
    }


def load_images(
    config: Any, geometry: Geometry, problem_type: ProblemType = "single_label_classification"
) -> tuple[Images, Images]:
    """Load the training and validation images of a config; for "regression", with the numbers in a column as targets.

    Training images are whole images, squeezed into squares of --decode_size. Validation images are the model's input,
    with the pixels of the exported image processor.

    An image with a corrupt header or a truncated file ends the run here. Other damage ends the run when the image is
    read, or here with --cache. With --skip_corrupt_images every image is decoded once; corrupt ones are left out and
    listed.

    Raises:
        UserError: the data cannot be read, or an image is corrupt.
        Unfinished: this process is a task of a job array and has decoded its share of each source, and another task has
            not.
    """
    sources = load_sources(config, problem_type)
    squares = geometry.training_square(config.decode_size), geometry.evaluation_square
    train, validation = each_share(lambda part: prepare(part[0], config, part[1]), zip(sources, squares, strict=True))
    return train, validation


def prepare(source: Images, config: Any, square: Square) -> Images:
    """Return the images of a source with their `square`, cached or checked as the config says.

    Images that are decoded already, such as the digits, stay as they are if the square need not be exact.

    Raises:
        UserError: an image is corrupt, or a class has only corrupt images.
        Unfinished: see `cache.build`.
    """
    source = replace(source, square=square)
    if source.arrays is not None:
        pixels, rows = source.arrays, source.rows
        if square.exact:
            pixels = np.stack([square.of(Image.fromarray(pixels[row])) for row in rows])
            rows = np.arange(len(source))
        return replace(source, pixels=pixels, aspects=np.ones(len(pixels), np.float32), places=rows)
    if not config.skip_corrupt_images:
        source.refuse(source.corrupt())
        if config.cache == "none":
            return source
    stored = source.key, len(source), source.stored, source.name
    folder = cache.build(*stored, square, keep_pixels=config.cache == "uint8")
    corrupt = cache.corrupt_images(folder)
    if not config.skip_corrupt_images:
        source.refuse(corrupt)
    if corrupt:
        say(f"{source.name}: {len(corrupt):,} of {len(source):,} images are corrupt and left out:")
        for i, problem in corrupt:
            say(f"  {source.where(i)} ({problem})")
    elif config.cache == "none":
        return source
    good = np.ones(len(source), np.bool_)
    good[[i for i, _ in corrupt]] = False
    places = shared_array(
        lambda: (block.start + np.flatnonzero(good[block]) for block in blocks(len(source))), np.int64
    )
    kept = source.take(places) if corrupt else source
    if not len(kept) or ((source.sizes() > 0) & (kept.sizes() == 0)).any():
        raise UserError(f"{source.name}: a class has only corrupt images: add others, or remove the class")
    if config.cache == "none":
        return kept
    pixels, aspects = cache.read(folder)
    return replace(kept, pixels=pixels, aspects=aspects, places=places)
