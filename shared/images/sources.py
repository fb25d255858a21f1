"""Sources of images with targets: scikit-learn's digits, folders of classes, or a column of a table."""

import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.cache.prepared import each_share, key_digest
from shared.datasets.labels import Labels, ProblemType
from shared.datasets.readers import KINDS, find_files
from shared.datasets.rows import column_of, content_of, is_text, refuse_missing, source_of
from shared.datasets.tables import TRAIN_SPLITS, VALIDATION_SPLITS, read_parts, split
from shared.errors import UserError, about, count_of, say
from shared.images.cache import check_images, key_of_files
from shared.images.decoding import Geometry
from shared.images.images import Images, with_square
from shared.pretrained.from_pretrained import label_order

EXTENSIONS = (".jpg", ".jpeg", ".jfif", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".avif", ".ppm", ".pgm")


def load_images(
    config: Any, geometry: Geometry, problem_type: ProblemType = "single_label_classification"
) -> tuple[Images, Images]:
    """Load the training and validation images of a config; for "regression", with the numbers in a column as targets.

    Training images are whole images, squeezed into squares of --decode_size. Validation images are the model's input,
    with the pixels of the exported image processor.

    An image with a corrupt header, or a truncated JPEG or PNG, ends the run here. Other damage ends the run when the
    image is read, or here with --cache. With --skip_corrupt_images every image is decoded once; corrupt ones are left
    out and listed.

    Raises:
        UserError: the data cannot be read, or an image is corrupt.
        Unfinished: this process is a task of a job array and has decoded its share of each source, and another task has
            not.
    """
    sources = load_sources(config, problem_type)
    squares = geometry.training_square(config.decode_size), geometry.evaluation_square
    train, validation = each_share(
        lambda part: with_square(part[0], config, part[1]), zip(sources, squares, strict=True)
    )
    return train, validation


def load_sources(config: Any, problem_type: ProblemType = "single_label_classification") -> tuple[Images, Images]:
    """The training and the validation images that a config names, or the digits if it names none.

    Without validation data, --validation_split_percentage of each class, or of all images with numbers, is held out.
    --max_train_samples and --max_eval_samples reduce the images (`tables.split` does both). With the `problem_type`
    "regression", the targets are the numbers in --label_column_name.

    Raises:
        UserError: the data cannot be read.
    """
    if config.train_dir:
        parts = [class_folders(config.train_dir, "--train_dir")]
        if config.validation_dir:
            parts.append(class_folders(config.validation_dir, "--validation_dir", parts[0].names))
    elif config.train_file or config.dataset_name:
        parts = from_tables(config, problem_type)
    else:
        parts = [digits()]
    names = parts[0].names
    if problem_type == "regression" and names:
        raise UserError(f"{parts[0].name} has classes, and regression needs a column of numbers: use --train_file")
    chosen = split([part.as_table() for part in parts], config, lambda _: parts[0].targets)
    if config.model_name_or_path and not config.from_scratch and names:
        names = label_order(config.model_name_or_path, names, config.revision)
    return parts[0].chosen(chosen[0]).ordered(names), parts[-1].chosen(chosen[1]).ordered(names)


def from_tables(config: Any, problem_type: ProblemType) -> list[Images]:
    """The training images of --train_file or --dataset_name, and the validation images if there is such a part.

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
    return [images_of(table, column, labels, folder) for table, folder in zip(tables, folders, strict=False)]


def folder_of(given: str | Sequence[str], flag: str) -> Path | None:
    """The folder of the files that a setting names; None if they are in more than one folder."""
    folders = {file.parent for file in find_files([given] if isinstance(given, str) else given, flag, KINDS)}
    return folders.pop() if len(folders) == 1 else None


def digits() -> Images:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, white on black."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.repeat((found.images * 255 / 16).round().astype(np.uint8)[..., None], 3, axis=3)
    names, targets = tuple(map(str, found.target_names)), found.target.astype(np.int64)
    return Images("the embedded digits", names, targets, np.arange(len(targets)), arrays=pixels)


def checked(source: Images) -> Images:
    """The source with the result of `check_images`; prints a line if some images have more than 8 bits per channel.

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
    found = check_images(key, len(source), source.stored, source.name)
    source = replace(source, checked=replace(found, folder=folder))
    if len(deep := found.deep):
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
    passed_over = Counter[str]()
    files = []  # of each class, as bytes: a str takes twice the memory
    for label in found:
        inside = images_below(root / label, name, passed_over)
        files.append(pa.array([os.fsencode(f"{label}/{file}") for file in inside], pa.binary()))
        if not len(files[-1]) and names is None:
            raise UserError(f"{name}: the class {label} has no image ({', '.join(EXTENSIONS)}): remove the folder")
    cells = pa.chunked_array(files, pa.binary())
    if not len(cells):
        raise UserError(f"{name} has no image in its subfolders ({', '.join(EXTENSIONS)})")
    passed_over["in no class's folder"] = len([*root.iterdir()]) - len(found)
    say_passed_over(name, passed_over)
    targets = np.repeat([classes.index(label) for label in found], [len(inside) for inside in files])
    return checked(Images(name, classes, targets, np.arange(len(cells)), cells=cells, folder=root))


def images_of(table: pa.Table, image_column: str, labels: Labels, folder: Path | None = None) -> Images:
    """The images in a column of a table: bytes, paths, or the structs of bytes and path that `datasets` writes.

    Args:
        folder: the folder to which paths are relative; None: a column of paths is an error.

    Raises:
        UserError: the column is missing or does not hold images, a file cannot be read, or labels are missing or
            unknown.
    """
    column = content = column_of(table, image_column, "--image_column_name")
    if pa.types.is_struct(column.type):
        inside = {field.name for field in column.type}
        content = pc.struct_field(column, "bytes" if "bytes" in inside else 0)
        if content.null_count == len(content) and "path" in inside:
            content = pc.struct_field(column, "path")
    is_path = is_text(content.type) and folder is not None
    if not is_path and ("binary" not in str(content.type) or content.type.num_fields):  # a list has a field
        raise UserError(
            f"--image_column_name {image_column}: {source_of(table)} holds {column.type} there, not images as bytes"
            f"{' or paths of files' * (folder is not None)}: write it with datasets' Image feature"
        )
    refuse_missing(table, image_column, content.is_null(), what="image")
    given = {"cells": content, "folder": folder if is_path else None, "table": table, "column": image_column}
    return checked(Images(source_of(table), labels.names, labels.encode(table), np.arange(len(table)), **given))


def say_passed_over(name: str, passed_over: Counter[str]) -> None:
    """Print how many files of `name` were skipped, by reason, if any."""
    if skipped := +passed_over:
        say(f"{name}: passed over {', '.join(f'{count:,} {why}' for why, count in sorted(skipped.items()))}")


def images_below(root: Path, name: str, passed_over: Counter[str], links: bool = False) -> Iterator[str]:
    """Yield the images in a folder and its subfolders, relative to it, sorted by the parts of their paths.

    At most the names in one folder, and in those above it, are in memory. Hidden files, other files, and links to
    folders (with `links`, not those in `root`) or to nothing are skipped and counted in `passed_over`, by reason.

    Raises:
        UserError: a folder cannot be read; the message names it and `name`.
    """
    kept = []
    with about(name), os.scandir(root) as entries:
        for entry in entries:
            ending = os.path.splitext(entry.name)[1].lower()  # noqa: PTH122  Path.suffix takes ten times as long
            # A Path makes system calls, but has no error for a link in a loop.
            target = Path(entry) if entry.is_symlink() else entry
            is_folder = target.is_dir() and (links or not entry.is_symlink())
            if entry.name.startswith("."):
                passed_over["hidden"] += 1
            elif is_folder or (ending in EXTENSIONS and target.is_file()):
                kept.append((entry.name, is_folder))
            else:
                passed_over["of other kinds"] += 1
    for found, is_folder in sorted(kept):
        if is_folder:
            yield from (f"{found}/{file}" for file in images_below(root / found, name, passed_over))
        else:
            yield found
