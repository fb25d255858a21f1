"""Where images come from: scikit-learn's digits, folders of classes, a column of a table; and their classes.

A source has images by number, their class ids and the names of the classes; it reads nothing before it is asked to.
"""

import hashlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.datasets.decoding import Pixels
from shared.datasets.labels import Labels
from shared.datasets.rows import FILL_IN, column_of, source_of, where
from shared.datasets.splits import share_of_each
from shared.datasets.tables import read_parts, subset
from shared.errors import UserError
from shared.pretrained import label_order

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


@dataclass(frozen=True)
class Source:
    """Images and their classes; which of the three it is decides what `stored` gives."""

    name: str  # as an error begins: "--train_dir photos"
    names: tuple[str, ...]  # of the classes
    targets: NDArray[np.int64]  # [N] class ids
    rows: NDArray[np.int64]  # [N] where each image is, below
    arrays: Pixels | None = None  # uint8 [M, side, side, 3], decoded
    paths: tuple[Path, ...] = ()
    table: pa.Table | None = None
    column: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def stored(self, i: int) -> bytes | Path:
        """Image number `i`, encoded: a file, or its bytes."""
        row = int(self.rows[i])
        if self.table is None:
            return self.paths[row]
        cell = self.table[self.column][row]
        if pa.types.is_struct(cell.type):
            return cell["bytes"].as_py() if cell["bytes"].is_valid else Path(cell["path"].as_py() or "")
        return cell.as_py()

    def digest(self) -> str:
        """A function of the classes, and of the images as far as can be told without reading them.

        That is their names in folders, the bytes of a table's column all together, and the pixels of decoded ones.
        """
        content = hashlib.blake2b(np.stack([self.rows, self.targets]).tobytes(), digest_size=16)
        content.update(b"" if self.arrays is None else self.arrays.data)
        content.update("\n".join("/".join(path.parts[-2:]) for path in self.paths).encode())
        content.update(b"" if self.table is None else str(self.table[self.column].nbytes).encode())
        return content.hexdigest()

    def where(self, i: int) -> str:
        """How to speak to the user about image number `i`."""
        row = int(self.rows[i])
        return where(self.table, row) if self.table is not None else f"{self.name}: {self.paths[row]}"

    def take(self, chosen: NDArray[Any]) -> "Source":
        """The source with the images `chosen` only: their numbers, or a mask."""
        return replace(self, targets=self.targets[chosen], rows=self.rows[chosen])

    def ordered(self, names: tuple[str, ...]) -> "Source":
        """The same images and classes with the ids that `names`, which are these names, give them."""
        places = np.array([names.index(name) for name in self.names])
        return replace(self, names=names, targets=places[self.targets])


def digits() -> Source:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, white on black."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.repeat((found.images * 255 / 16).round().astype(np.uint8)[..., None], 3, axis=3)
    names = tuple(map(str, found.target_names))
    targets = found.target.astype(np.int64)
    return Source("the embedded digits", names, targets, np.arange(len(targets)), arrays=pixels)


def class_folders(folder: str, flag: str, names: tuple[str, ...] | None = None) -> Source:
    """The images in the subfolders of `folder`, each of which is a class; `names` are those of the training data.

    Raises:
        UserError: no such folder, no classes or only one, a class without images, or one that training lacks.
    """
    root, name = Path(folder), f"{flag} {folder}"
    if not root.is_dir():
        raise UserError(f"{name}: no such folder" if not root.exists() else f"{name} is a file: give a folder")
    found = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if names is None and len(found) < 2:
        raise UserError(
            f"{name} has {len(found)} subfolders, and each is a class: put the images into two or more, as in "
            f"{folder}/cat, {folder}/dog"
        )
    if unknown := [label for label in found if label not in (names or found)]:
        raise UserError(f"{name} has a class {unknown[0]} that --train_dir does not have: leave it out there")
    paths, targets = [], []
    for label in found:
        inside = sorted(path for path in (root / label).rglob("*") if path.suffix.lower() in EXTENSIONS)
        if not inside and names is None:
            raise UserError(f"{name}: the class {label} has no image ({', '.join(EXTENSIONS)}): remove the folder")
        paths += inside
        targets += [(names or tuple(found)).index(label)] * len(inside)
    if not paths:
        raise UserError(f"{name} has no image in its subfolders ({', '.join(EXTENSIONS)})")
    return Source(name, names or tuple(found), np.array(targets), np.arange(len(paths)), paths=tuple(paths))


def of_table(table: pa.Table, image_column: str, labels: Labels) -> Source:
    """The images in a column of a table: bytes, or the structs of bytes and path that `datasets` writes.

    Raises:
        UserError: there is no such column, it holds no images, or labels are missing or unknown.
    """
    column = column_of(table, image_column, "--image_column_name")
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
    content = column.type
    if pa.types.is_struct(content) and content.get_field_index("bytes") >= 0:
        content = content.field("bytes").type
    if not any(is_binary(content) for is_binary in binary):
        raise UserError(
            f"--image_column_name {image_column}: {source_of(table)} holds {column.type} there, not images as bytes: "
            "write it with datasets' Image feature"
        )
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise UserError(f"{where(table, row)} has no image in {image_column}: {FILL_IN}")
    targets = labels.encode(table)
    return Source(source_of(table), labels.names, targets, np.arange(len(table)), table=table, column=image_column)


def load_sources(config: Any) -> tuple[Source, Source]:
    """The training and the validation images that a config names; without any, the digits.

    Where there is no validation part, --validation_split_percentage of each class is held out, chosen by --seed.

    Raises:
        UserError: flags that exclude each other, or data that cannot be read.
    """
    given = {flag: getattr(config, flag) for flag in ("train_dir", "train_file", "dataset_name")}
    if len(given := {flag: value for flag, value in given.items() if value}) > 1:
        raise UserError(f"{' and '.join(f'--{flag} {value}' for flag, value in given.items())}: give one of them")
    validation: Source | None = None
    if config.train_dir:
        train = class_folders(config.train_dir, "--train_dir")
        if config.validation_dir:
            validation = class_folders(config.validation_dir, "--validation_dir", train.names)
    elif config.train_file or config.dataset_name:
        tables = read_tables(config)
        labels = Labels.from_table(tables[0], config.label_column_name, "single_label_classification")
        train, *others = (of_table(table, config.image_column_name, labels) for table in tables)
        validation = others[0] if others else None
    else:
        train = digits()
    if validation is None:
        train, validation = hold_out(train, config.validation_split_percentage, config.seed)
        if os.environ.get("RANK", "0") == "0":  # every process comes here, one speaks
            print(
                f"{train.name}: no validation part, {len(validation):,} images "
                f"({config.validation_split_percentage} % of each class, chosen by --seed {config.seed}) are kept for "
                "it",
                file=sys.stderr,
            )
    if config.model_name_or_path and not config.from_scratch:
        names = label_order(config.model_name_or_path, train.names)
        return train.ordered(names), validation.ordered(names)
    return train, validation


def limited(sources: tuple[Source, Source], config: Any) -> Iterator[Source]:
    """Training and validation images, of which --max_train_samples and --max_eval_samples leave some."""
    for source, name in zip(sources, ("max_train_samples", "max_eval_samples"), strict=True):
        chosen = subset(len(source), getattr(config, name), config.seed, f"--{name}")
        yield source if chosen is None else source.take(chosen)


def read_tables(config: Any) -> list[pa.Table]:
    """The training table of --train_file or --dataset_name, and the validation table if there is one."""
    train, validation = read_parts(config, [config.image_column_name], [config.label_column_name])
    return [train] if validation is None else [train, validation]


def hold_out(source: Source, percentage: int, seed: int) -> tuple[Source, Source]:
    """`source` without `percentage` of each class (see `share_of_each`), and those images.

    Raises:
        UserError: there are too few images for that.
    """
    held_out = share_of_each(source.targets, percentage, seed)
    if not held_out.any():
        raise UserError(
            f"{source.name}: {len(source):,} images are too few to hold out {percentage} % of each class: add images, "
            "or change --validation_split_percentage"
        )
    return source.take(~held_out), source.take(held_out)
