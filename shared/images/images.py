"""Images with targets as a data set: decoded when they are read, or taken from the cache of decoded pixels; batches."""

import base64
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from PIL import Image

from shared.datasets.rows import ROW_COLUMN, named, where
from shared.errors import UserError, listed, say
from shared.images import cache
from shared.images.decoding import CorruptImage, Pixels, Square, decode, inspect
from shared.plan.draws import Ints

SHOWN = 96  # pixels per side of a picture


@dataclass(frozen=True)
class Images:
    """Images with targets: decoded in `arrays`, or encoded in `cells`, which may be the names of their files.

    Once `with_square` has set `square`, this is a data set whose items are (uint8 [side, side, 3], aspect ratio as
    width / height, class id or number).
    """

    name: str  # the start of its error messages: "--train_dir photos"
    names: tuple[str, ...]  # class names; empty for numbers
    targets: NDArray[Any]  # [N] class ids (int64), or numbers to be predicted (float64)
    rows: NDArray[np.int64]  # [N] the index of each image in `arrays` or `cells`, ascending
    arrays: Pixels | None = None  # uint8 [M, side, side, 3], already decoded
    cells: pa.ChunkedArray | None = None  # [M] encoded images, or the names of their files
    folder: Path | None = None  # to which the names of files are relative; None if `cells` are encoded images
    table: pa.Table | None = None
    column: str = ""  # of `table`, with the images
    checked: cache.Checked | None = None  # the check of `cells`
    square: Square | None = None  # what `decode` makes of an image
    pixels: Pixels | cache.Squares | None = None  # uint8 [N, side, side, 3], the squares, if they are decoded already
    aspects: NDArray[np.float32] | None = None  # [N] of `pixels`

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Pixels, float, Any]:
        if self.pixels is not None and self.aspects is not None:
            return self.pixels[i], self.aspects[i], self.targets[i]
        assert self.square is not None
        try:
            pixels, aspect = decode(self.stored(i), self.square)
        except CorruptImage:
            self.refuse(np.array([i]))
        return pixels, aspect, self.targets[i]

    def read_micro_batch(self, samples: NDArray[np.int64], _: NDArray[np.int64]) -> Any:
        """Return what `collate` takes: a list of items, or one array per field if all images are decoded already.

        The result is the same in every epoch: augmentation comes later (shared/augmentation/augmentation.py).
        """
        if self.pixels is None or self.aspects is None:
            return [self[i] for i in samples.tolist()]
        return self.pixels[samples], self.aspects[samples], self.targets[samples]

    def picture(self, i: int) -> dict[str, str]:
        """What the model sees of image i as {"picture": a PNG of at most SHOWN pixels per side, as a data URL}.

        An image that is squeezed into its square has its aspect ratio again.
        """
        pixels, aspect, _ = self[i]
        aspect = 1.0 if self.square and self.square.resize is not None else aspect  # else the square is cut out
        size = (max(1, round(SHOWN * min(1, aspect))), max(1, round(SHOWN / max(1, aspect))))
        how = Image.Resampling.NEAREST if len(pixels) < SHOWN else Image.Resampling.LANCZOS
        file = io.BytesIO()
        Image.fromarray(np.asarray(pixels)).resize(size, how).save(file, "PNG")
        return {"picture": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}

    def __str__(self) -> str:
        return f"{len(self.names)} classes: {listed(self.names, 10)}" if self.names else "with numbers to predict"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [N], the cost of each image: 1, which takes no memory."""
        return np.broadcast_to(np.int64(1), len(self))

    def stored(self, i: int) -> Any:
        """The encoded image number `i`: bytes, or the Path of a file if there is a `folder`."""
        assert self.cells is not None
        cell = self.cells[int(self.rows[i])].as_py()
        return self.folder / os.fsdecode(cell) if self.folder else cell

    def files(self) -> Iterator[str]:
        """The absolute paths of the files."""
        return (str(self.stored(i).absolute()) for i in range(len(self)))

    def digest(self) -> str:
        """A hash of the class names, the targets and the images (their pixels, or fingerprints if they are encoded).

        Files enter with their paths relative to their common folder. The place of that folder and the file times are
        not included: a copy of the data has the same digest.
        """
        content = hashlib.blake2b(json.dumps(self.names).encode(), digest_size=16)
        content.update(np.ascontiguousarray(self.targets).data)
        images = self.checked.prints if self.checked else self.arrays
        assert images is not None
        content.update(images[self.rows].tobytes())
        if self.checked and self.checked.folder:
            for i, file in enumerate(self.files()):
                content.update(("\0" * (i > 0) + file[len(self.checked.folder) :]).encode(errors="surrogateescape"))
        return content.hexdigest()

    @property
    def key(self) -> str:
        """A key that changes when an encoded image or the choice of images changes; valid on this machine only."""
        assert self.checked is not None
        key = hashlib.blake2b(self.checked.key.encode(), digest_size=16)
        key.update(self.rows.data)
        return key.hexdigest()

    def refuse(self, corrupt: Ints) -> None:
        """Raise a UserError that names the first corrupt image, if there are any."""
        if len(corrupt):
            first = int(corrupt[0])
            raise UserError(
                f"{self.where(first)} is corrupt ({self.problem(first)}): replace it, or leave such images out with "
                "--skip_corrupt_images, which lists all of them"
            )

    def problem(self, i: int) -> str:
        """Why the corrupt image number `i` cannot be decoded."""
        return inspect(self.stored(i), whole=True)[2]

    def where(self, i: int) -> str:
        """The name of image number `i` in messages."""
        row = int(self.rows[i])
        place = self.name if self.table is None else where(self.table, row)
        return f"{place}: {self.stored(i)}" if self.folder else place

    def as_table(self) -> pa.Table:
        """The targets as a table, from which `tables` selects rows: see `chosen`."""
        return named(pa.table({"target": self.targets}), self.name)

    def chosen(self, selection: pa.Table) -> "Images":
        """Only the images that a selection from `as_table` has."""
        if ROW_COLUMN not in selection.column_names:  # all of them
            return self
        return self.take(np.asarray(selection[ROW_COLUMN]))

    def take(self, places: Ints) -> "Images":
        """Only the images with these numbers, in ascending order."""
        assert self.pixels is None  # `with_square` sets it, after the choice of images
        return replace(self, targets=self.targets[places], rows=self.rows[places])

    def ordered(self, names: tuple[str, ...]) -> "Images":
        """The same images with class ids in the order of `names`, a permutation of the class names."""
        if names == self.names:
            return self
        places = np.array([names.index(name) for name in self.names])
        return replace(self, names=names, targets=places[self.targets])

    def sizes(self) -> NDArray[np.int64]:
        """int64 [classes]: the number of images of each class; empty if the targets are numbers."""
        return np.bincount(self.targets, minlength=len(self.names)) if self.names else np.empty(0, np.int64)


def collate(items: Any) -> dict[str, torch.Tensor]:
    """Make a batch: images uint8 [rows, side, side, 3], aspects float32 [rows], labels int64 or float64 [rows]."""
    pixels, aspects, targets = items if isinstance(items, tuple) else zip(*items, strict=True)
    return {
        "images": torch.from_numpy(np.stack(pixels) if isinstance(pixels, tuple) else pixels),
        "aspects": torch.from_numpy(np.asarray(aspects, np.float32)),
        "labels": torch.from_numpy(np.asarray(targets)),
    }


def with_square(images: Images, config: Any, square: Square) -> Images:
    """Return the images with their `square`, cached or checked as the config says.

    Images that are decoded already, such as the digits, stay as they are if the square need not be exact.

    Raises:
        UserError: an image is corrupt, or a class has only corrupt images.
        Unfinished: see `cache.build`.
    """
    images = replace(images, square=square)
    if images.arrays is not None:
        pixels = images.arrays[images.rows]
        if square.exact:
            pixels = np.stack([square.of(Image.fromarray(each)) for each in pixels])
        return replace(images, pixels=pixels, aspects=np.ones(len(pixels), np.float32))
    assert images.checked is not None
    skip = config.skip_corrupt_images
    if not skip:
        images.refuse(np.flatnonzero(np.isin(images.rows, images.checked.corrupt)))
    encoded = images.key, len(images), images.stored, images.name
    if config.cache == "none":
        return without_corrupt(images, cache.check_images(*encoded, whole=True).corrupt) if skip else images
    squares, aspects, corrupt = cache.build(*encoded, square)
    if not skip:
        images.refuse(corrupt)
    return replace(without_corrupt(images, corrupt), pixels=squares, aspects=aspects)


def without_corrupt(images: Images, corrupt: Ints) -> Images:
    """Only the images that can be decoded; the others, with the numbers `corrupt`, are listed.

    Raises:
        UserError: a class has only corrupt images.
    """
    if not len(corrupt):
        return images
    say(f"{images.name}: {len(corrupt):,} of {len(images):,} images are corrupt and left out:")
    for i in corrupt.tolist():
        say(f"  {images.where(i)} ({images.problem(i)})")
    chosen = images.take(np.delete(np.arange(len(images)), corrupt))
    if not len(chosen) or ((images.sizes() > 0) & (chosen.sizes() == 0)).any():
        raise UserError(f"{images.name}: a class has only corrupt images: add others, or remove the class")
    return chosen
