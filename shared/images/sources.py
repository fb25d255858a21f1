"""Sources of images with targets: scikit-learn's digits, folders of classes, or a column of a table.

A source gives images by number, and their targets: class ids, or numbers to be predicted. It reads an image only on
request.
"""

import base64
import hashlib
import io
import json
import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from PIL import Image

from shared.cache.prepared import key_digest, mapped_file, shared_array
from shared.datasets.labels import Labels, ProblemType
from shared.datasets.readers import KINDS, find_files
from shared.datasets.rows import (
    ROW_COLUMN,
    column_of,
    content_of,
    is_text,
    named,
    refuse_missing,
    source_of,
    where,
    with_content,
)
from shared.datasets.tables import TRAIN_SPLITS, VALIDATION_SPLITS, hold_out, limited, read_parts
from shared.errors import UserError, about, count_of, listed, say
from shared.images.cache import Checked, check, key_of_files
from shared.images.decoding import CorruptImage, Pixels, Square, decode
from shared.images.paths import EXTENSIONS, images_below, stored_names
from shared.plan.draws import Ints
from shared.pretrained.from_pretrained import label_order

BLOCK = 1 << 16  # images whose numbers are read at once
SHOWN = 96  # pixels per side of a picture


def blocks(count: int) -> Iterator[slice]:
    """The images 0 ... count - 1 in blocks."""
    for first in range(0, count, BLOCK):
        yield slice(first, min(first + BLOCK, count))


def numbers(count: int) -> Ints:
    """int64 [count]: 0 ... count - 1. The array is memory-mapped if it is large: see `shared_array`."""
    return shared_array(lambda: (np.arange(block.start, block.stop) for block in blocks(count)), np.int64)


@dataclass(frozen=True)
class Images:
    """Images with targets: decoded in `arrays`, or encoded in `cells`, which may be the names of their files.

    Once `images.prepare` has set `square`, this is a data set whose items are (uint8 [side, side, 3], aspect ratio as
    width / height, class id or number). The arrays of many images are memory-mapped: see `shared_array`.
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
    labels: Labels | None = None  # the meaning of the column of the targets in `table`
    checked: Checked | None = None  # the check of `cells`
    square: Square | None = None  # what `decode` makes of an image
    pixels: Pixels | None = None  # uint8 [K, side, side, 3], the squares, if they are decoded already
    aspects: NDArray[np.float32] | None = None  # [K] of `pixels`
    places: NDArray[np.int64] | None = None  # [N] the index of each image in `pixels`

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Pixels, float, Any]:
        if self.pixels is not None and self.aspects is not None and self.places is not None:
            return self.pixels[self.places[i]], self.aspects[self.places[i]], self.targets[i]
        assert self.square is not None
        try:
            pixels, aspect = decode(self.stored(i), self.square)
        except CorruptImage as problem:
            self.refuse([(i, str(problem))])
        return pixels, aspect, self.targets[i]

    def read_micro_batch(self, samples: NDArray[np.int64], _: NDArray[np.int64]) -> Any:
        """Return what `collate` takes: a list of items, or one array per field if all images are decoded already.

        The result is the same in every epoch: augmentation comes later (shared/augmentation/augmentation.py).
        """
        if self.pixels is None or self.aspects is None or self.places is None:
            return [self[i] for i in samples.tolist()]
        rows = self.places[samples]
        return self.pixels[rows], self.aspects[rows], self.targets[samples]

    def picture(self, i: int) -> dict[str, str]:
        """Image i in its aspect ratio as {"picture": a PNG of at most SHOWN pixels per side, as a data URL}."""
        pixels, aspect, _ = self[i]
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
        for block in blocks(len(self)):
            content.update(images[self.rows[block]].tobytes())
        if self.checked and self.checked.folder:
            for i, file in enumerate(self.files()):
                content.update(("\0" * (i > 0) + file[len(self.checked.folder) :]).encode(errors="surrogateescape"))
        return content.hexdigest()

    @property
    def key(self) -> str:
        """A key that changes when an encoded image or the choice of images changes; valid on this machine only."""
        assert self.checked is not None
        key = hashlib.blake2b(self.checked.key.encode(), digest_size=16)
        for block in blocks(len(self)):
            key.update(self.rows[block].data)
        return key.hexdigest()

    def corrupt(self) -> list[tuple[int, str]]:
        """Return (image number, error text) of each image that `check` found corrupt."""
        found = []
        for row, problem in self.checked.problems.items() if self.checked else ():
            place = int(np.searchsorted(self.rows, row))
            if row in self.rows[place : place + 1]:
                found.append((place, problem))
        return found

    def refuse(self, corrupt: Sequence[tuple[int, str]]) -> None:
        """Raise a UserError that names the first few corrupt images, if there are any."""
        if corrupt:
            (first, problem), *others = corrupt
            more = f", and so are {listed([self.where(i) for i, _ in others], 3)}" if others else ""
            raise UserError(
                f"{self.where(first)} is corrupt ({problem}){more}: replace it, or leave such images out with "
                "--skip_corrupt_images"
            )

    def where(self, i: int) -> str:
        """The name of image number `i` in messages."""
        row = int(self.rows[i])
        place = self.name if self.table is None else where(self.table, row)
        return f"{place}: {self.stored(i)}" if self.folder else place

    def as_table(self) -> pa.Table:
        """The targets as a table, from which `tables` selects rows: see `chosen`."""
        table, file = named(pa.table({"target": self.targets}), self.name), mapped_file(self.targets)
        return with_content(table, file.parent.name) if file else table

    def chosen(self, selection: pa.Table) -> "Images":
        """Only the images that a selection from `as_table` has."""
        if ROW_COLUMN not in selection.column_names:  # all of them
            return self
        return self.take(shared_array(lambda: map(np.asarray, selection[ROW_COLUMN].chunks), np.int64))

    def take(self, places: Ints) -> "Images":
        """Only the images with these numbers, in ascending order."""
        assert self.places is None  # `prepare` sets it, after the choice of images

        def of(values: NDArray[Any]) -> NDArray[Any]:
            return shared_array(lambda: (values[places[block]] for block in blocks(len(places))), values.dtype)

        return replace(self, targets=of(self.targets), rows=of(self.rows))

    def ordered(self, names: tuple[str, ...]) -> "Images":
        """The same images with class ids in the order of `names`, a permutation of the class names."""
        if names == self.names:
            return self
        places = np.array([names.index(name) for name in self.names])
        targets = shared_array(lambda: (places[self.targets[block]] for block in blocks(len(self))), np.int64)
        return replace(self, names=names, targets=targets, labels=self.labels and self.labels.ordered(names))

    def sizes(self) -> NDArray[np.int64]:
        """int64 [classes]: the number of images of each class; empty if the targets are numbers."""
        return np.bincount(self.targets, minlength=len(self.names)) if self.names else np.empty(0, np.int64)


def digits() -> Images:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, white on black."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.repeat((found.images * 255 / 16).round().astype(np.uint8)[..., None], 3, axis=3)
    names = tuple(map(str, found.target_names))
    targets = found.target.astype(np.int64)
    return Images("the embedded digits", names, targets, np.arange(len(targets)), arrays=pixels)


def checked(source: Images) -> Images:
    """The source with the result of `check`; prints a line if some images have more than 8 bits per channel.

    Raises:
        UserError: a file cannot be read.
    """
    assert source.cells is not None
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata, sizes and palettes
    if source.folder:
        with about(f"{source.name}, whose paths are relative to {source.folder}"):
            key, folder = key_of_files(source.files())
    else:
        content = source.table is not None and content_of(source.table)
        key, folder = key_digest(content or [key_digest(cell.as_py()) for cell in source.cells], source.column), ""
    found = check(key, len(source), source.stored, source.name)
    source = replace(source, checked=replace(found, folder=folder))
    if deep := found.deep:
        say(
            f"{source.name}: {count_of(len(deep), 'image')} with more than 8 bits per pixel and channel, such as "
            f"{source.where(deep[0])}: read as in transformers' pipelines, which clip values at 255; convert to 8 bits "
            "if values are larger, or fractions"
        )
    return source


def class_folders(folder: str, flag: str, names: tuple[str, ...] | None = None) -> Images:
    """The images in the subfolders of `folder`, one class per subfolder; `names` are the classes of the training data.

    Hidden files, files without an image extension and whatever is not a regular file are skipped; a line prints how
    many.

    Raises:
        UserError: there is no such folder, it has splits instead of classes, or fewer than two classes, a class has no
            images, or a class is not one of the training data's.
    """
    root, name = Path(folder), f"{flag} {folder}"
    with about(name):
        found = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    splits = [label for label in found if label.lower() in TRAIN_SPLITS + VALIDATION_SPLITS]
    if splits and (len(splits) > 1 or splits == found):
        raise UserError(
            f"{name} has splits ({', '.join(splits)}), not classes: give --train_dir and --validation_dir, such as "
            f"{root / splits[0]}"
        )
    if names is None and len(found) < 2:
        raise UserError(
            f"{name} has {count_of(len(found), 'subfolder')}, and each class needs one: put the images into two or "
            f"more, as in {folder}/cat, {folder}/dog"
        )
    if odd := [label for label in found if {"Cc", "Cs"} & {*map(unicodedata.category, label)}]:
        raise UserError(f"{name} has a class {odd[0]!r}, whose name is not text: rename the folder")
    if unknown := [label for label in found if label not in (names or found)]:
        raise UserError(f"{name} has a class {unknown[0]} that the training images do not have: remove its folder")
    classes = names or tuple(found)
    counts, passed_over = Counter[str](), Counter[str]()

    def files() -> Iterator[str]:
        for label in found:
            for file in images_below(root / label, name, passed_over):
                counts[label] += 1
                yield f"{label}/{file}"
            if not counts[label] and names is None:
                raise UserError(f"{name}: the class {label} has no image ({', '.join(EXTENSIONS)}): remove the folder")

    if not len(cells := stored_names(files())):
        raise UserError(f"{name} has no image in its subfolders ({', '.join(EXTENSIONS)})")
    passed_over["in no class's folder"] = len([*root.iterdir()]) - len(found)
    if skipped := +passed_over:
        say(f"{name}: passed over {', '.join(f'{count:,} {why}' for why, count in sorted(skipped.items()))}")

    def targets() -> Iterator[NDArray[np.int64]]:
        for label in found:
            for block in blocks(counts[label]):
                yield np.full(block.stop - block.start, classes.index(label))

    of_files = {"cells": cells, "folder": root}
    return checked(Images(name, classes, shared_array(targets, np.int64), numbers(len(cells)), **of_files))


def image_cells(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The bytes, or else the paths, in a column of images, which may be the structs that `datasets` writes."""
    if not pa.types.is_struct(column.type):
        return column
    inside = {field.name for field in column.type}
    content = pc.struct_field(column, "bytes" if "bytes" in inside else 0)
    return pc.struct_field(column, "path") if content.null_count == len(content) and "path" in inside else content


def of_table(table: pa.Table, image_column: str, labels: Labels, folder: Path | None = None) -> Images:
    """The images in a column of a table: bytes, paths, or the structs of bytes and path that `datasets` writes.

    Args:
        folder: the folder to which paths are relative; None: a column of paths is an error.

    Raises:
        UserError: the column is missing or does not hold images, a file cannot be read, or labels are missing or
            unknown.
    """
    column = column_of(table, image_column, "--image_column_name")
    content = image_cells(column)
    is_path = is_text(content.type) and folder is not None
    if not is_path and "binary" not in str(content.type):
        raise UserError(
            f"--image_column_name {image_column}: {source_of(table)} holds {column.type} there, not images as bytes"
            f"{' or paths of files' * (folder is not None)}: write it with datasets' Image feature"
        )
    refuse_missing(table, image_column, content.is_null(), what="image")
    given = {"cells": content, "folder": folder if is_path else None, "table": table, "column": image_column}
    targets, rows = labels.encode(table), numbers(len(table))
    return checked(Images(source_of(table), labels.names, targets, rows, labels=labels, **given))


def load_sources(config: Any, problem_type: ProblemType = "single_label_classification") -> tuple[Images, Images]:
    """The training and the validation images that a config names, or the digits if it names none.

    Without validation data, --validation_split_percentage of each class, or of all images with numbers, is held out
    (`tables.hold_out`). --max_train_samples and --max_eval_samples reduce the images (`tables.limited`). With the
    `problem_type` "regression", the targets are the numbers in --label_column_name.

    Raises:
        UserError: the data cannot be read.
    """
    validation: Images | None = None
    if config.train_dir:
        train = class_folders(config.train_dir, "--train_dir")
        if config.validation_dir:
            validation = class_folders(config.validation_dir, "--validation_dir", train.names)
    elif config.train_file or config.dataset_name:
        train, validation = from_tables(config, problem_type)
    else:
        train = digits()
    if problem_type == "regression" and train.names:
        raise UserError(f"{train.name} has classes, and regression needs a column of numbers: use --train_file")
    if validation is None:
        percentage, seed = config.validation_split_percentage, config.seed
        train, validation = map(train.chosen, hold_out(train.as_table(), percentage, seed, train.targets))
    if config.model_name_or_path and not config.from_scratch and train.names:
        names = label_order(config.model_name_or_path, train.names, config.revision)
        train, validation = train.ordered(names), validation.ordered(names)
    chosen = limited((train.as_table(), validation.as_table()), config)
    return train.chosen(chosen[0]), validation.chosen(chosen[1])


def from_tables(config: Any, problem_type: ProblemType) -> tuple[Images, Images | None]:
    """The training and the validation images of --train_file or --dataset_name; None if there is no validation part.

    Paths in a column are relative to the folder of the file, or to the folder that `save_to_disk` wrote.
    """
    if config.train_file:
        given = {"--train_file": config.train_file, "--validation_file": config.validation_file or config.train_file}
        folders = [folder_of(files, flag) for flag, files in given.items()]
    else:
        folders = [Path(config.dataset_name) if Path(config.dataset_name).is_dir() else None] * 2
    tables = read_parts(config, [config.image_column_name], [config.label_column_name], problem_type)
    labels = Labels.from_table(tables[0], config.label_column_name, problem_type)
    column = config.image_column_name
    parts = [of_table(table, column, labels, folder) for table, folder in zip(tables, folders, strict=False)]
    return parts[0], parts[1] if len(parts) > 1 else None


def folder_of(given: str | Sequence[str], flag: str) -> Path | None:
    """The folder of the files that a setting names; None if they are in more than one folder."""
    names = [given] if isinstance(given, str) else given
    folders = {file.parent for file in find_files(names, flag, KINDS)}
    return folders.pop() if len(folders) == 1 else None
