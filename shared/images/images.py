"""The image data set: squares of RGB bytes, decoded when they are read or taken from the cache, and their targets."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from shared.cache.prepared import each_share, shared_array
from shared.datasets.labels import ProblemType
from shared.errors import UserError, listed, say
from shared.images import cache
from shared.images.decoding import CorruptImage, Geometry, Pixels, Square, decode
from shared.images.sources import Source, blocks, load_sources

SHOWN = 96  # pixels per side of a picture


@dataclass
class Images(Dataset):
    """Items are (uint8 [side, side, 3], aspect ratio as width / height, class id or number).

    `pixels` and `aspects` hold all images if they are decoded already (the digits, or a memory-mapped cache). Image i
    is then in row `places[i]`.
    """

    source: Source
    square: Square
    pixels: Pixels | None = None
    aspects: NDArray[np.float32] | None = None
    places: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, i: int) -> tuple[Pixels, float, Any]:
        target = self.source.targets[i]
        if self.pixels is not None and self.aspects is not None and self.places is not None:
            return self.pixels[self.places[i]], self.aspects[self.places[i]], target
        try:
            pixels, aspect = decode(self.source.stored(i), self.square)
        except CorruptImage as problem:
            refuse_corrupt(self.source, [(i, str(problem))])
        return pixels, aspect, target

    def read_micro_batch(self, samples: NDArray[np.int64], _: NDArray[np.int64]) -> Any:
        """Return what `collate` takes: a list of items, or one array per field if all images are decoded already.

        The result is the same in every epoch: augmentation comes later (shared/augmentation/augmentation.py).
        """
        if self.pixels is None or self.aspects is None or self.places is None:
            return [self[i] for i in samples.tolist()]
        rows = self.places[samples]
        return self.pixels[rows], self.aspects[rows], self.source.targets[samples]

    def picture(self, i: int) -> dict[str, str]:
        """Image i in its aspect ratio as {"picture": a PNG of at most SHOWN pixels per side, as a data URL}."""
        pixels, aspect, _ = self[i]
        size = (max(1, round(SHOWN * min(1, aspect))), max(1, round(SHOWN / max(1, aspect))))
        how = Image.Resampling.NEAREST if len(pixels) < SHOWN else Image.Resampling.LANCZOS
        file = io.BytesIO()
        Image.fromarray(np.asarray(pixels)).resize(size, how).save(file, "PNG")
        return {"picture": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}

    def __str__(self) -> str:
        names = self.source.names
        return f"{len(names)} classes: {listed(names, 10)}" if names else "with numbers to predict"

    def digest(self) -> str:
        """See `Source.digest`."""
        return self.source.digest()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [N], the cost of each image: 1, which takes no memory."""
        return np.broadcast_to(np.int64(1), len(self))

    @property
    def targets(self) -> NDArray[Any]:
        """int64 [N] class ids, or float64 [N] numbers."""
        return self.source.targets


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


def prepare(source: Source, config: Any, square: Square) -> Images:
    """Return the images of a source as squares, cached or checked as the config says.

    Images that are decoded already, such as the digits, stay as they are if the square need not be exact.

    Raises:
        UserError: an image is corrupt, or a class has only corrupt images.
        Unfinished: see `cache.build`.
    """
    if source.arrays is not None:
        aspects = np.ones(len(source.arrays), np.float32)
        if not square.exact:
            return Images(source, square, source.arrays, aspects, source.rows)
        pixels = np.stack([square.of(Image.fromarray(source.arrays[row])) for row in source.rows])
        return Images(source, square, pixels, aspects, np.arange(len(source)))
    if not config.skip_corrupt_images:
        refuse_corrupt(source, source.corrupt())
        if config.cache == "none":
            return Images(source, square)
    stored = source.key, len(source), source.stored, source.name
    folder = cache.build(*stored, square, keep_pixels=config.cache == "uint8")
    corrupt = cache.corrupt_images(folder)
    if not config.skip_corrupt_images:
        refuse_corrupt(source, corrupt)
    if corrupt:
        say(f"{source.name}: {len(corrupt):,} of {len(source):,} images are corrupt and left out:")
        for i, problem in corrupt:
            say(f"  {source.where(i)} ({problem})")
    elif config.cache == "none":
        return Images(source, square)
    good = np.ones(len(source), np.bool_)
    good[[i for i, _ in corrupt]] = False
    places = shared_array(
        lambda: (block.start + np.flatnonzero(good[block]) for block in blocks(len(source))), np.int64
    )
    kept = source.take(places) if corrupt else source
    if not len(kept) or ((source.sizes() > 0) & (kept.sizes() == 0)).any():
        raise UserError(f"{source.name}: a class has only corrupt images: add others, or remove the class")
    if config.cache == "none":
        return Images(kept, square)
    return Images(kept, square, *cache.read(folder), places)


def refuse_corrupt(source: Source, corrupt: Sequence[tuple[int, str]]) -> None:
    """Raise a UserError that names the first few corrupt images, if there are any."""
    if corrupt:
        (first, problem), *others = corrupt
        more = f", and so are {listed([source.where(i) for i, _ in others], 3)}" if others else ""
        raise UserError(
            f"{source.where(first)} is corrupt ({problem}){more}: replace it, or leave such images out with "
            "--skip_corrupt_images"
        )
