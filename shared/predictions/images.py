"""Predictions of an image classifier, or of regression on images, for a folder of images or a column of a file."""

import os
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shared.augmentation.augmentation import Augmentation
from shared.datasets.labels import Labels
from shared.datasets.rows import is_text, named
from shared.errors import UserError, about, count_of, listed
from shared.images.image_models import adapt_to_device, load_geometry
from shared.images.images import Images, collate, with_square
from shared.images.sources import EXTENSIONS, folder_of, images_below, images_of, load_sources, say_passed_over
from shared.predictions.labels import Mask, label_outputs, labels_of_model, targets_of, with_targets
from shared.predictions.prediction import Prediction, build_model, read_rows
from shared.predictions.request import Request

FILE_COLUMN, LABEL_COLUMN, NUMBER_COLUMN = "file", "label", "image"  # of images that are not in a table
MOST_RANKED = 5  # classes per image, for top-5 accuracy


def predict_images(accelerator: Any, request: Request) -> Prediction:
    """The prediction of a folder of images, of --image_column_name of a file, or of the run's validation data.

    Raises:
        UserError: the model, an image or the labels cannot be used.
    """
    config, labels, geometry = request.config, labels_of_model(request), load_geometry(request.config)
    model = build_model(request, labels.names)
    source, table, scored = read_images(request, labels)
    data = with_square(source, config, geometry.evaluation_square)
    if len(data) < len(source):  # --skip_corrupt_images leaves some out
        kept = np.isin(source.rows, data.rows)
        table, scored = table.filter(pa.array(kept)), scored[kept]
    ranked = min(MOST_RANKED, labels.num_labels)
    how = Augmentation(config, geometry)
    model = adapt_to_device(accelerator, config, model, geometry)
    return Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=request.batches(data.lengths),
        model=model,
        predict_batch=partial(request.call, "predict_batch", how),
        **label_outputs(request, labels, data.targets, scored, count_of(len(data), "image"), ranked),
    )


def read_images(request: Request, labels: Labels) -> tuple[Images, pa.Table, Mask]:
    """The images to predict with their targets, the rows of the output's first columns, and which rows are scored.

    Raises:
        UserError: the images cannot be read, or their labels are not those of the model.
    """
    config, file = request.config, request.file
    if file is None:
        _, source = load_sources(config, labels.problem_type)
        if source.names != labels.names:
            raise UserError(f"the run's images now have other classes ({listed(source.names)}) than its model")
        return source, columns_of_run(source), np.full(len(source), config.scores)
    column, folder = config.image_column_name, Path(file) if Path(file).is_dir() else None
    if folder:
        column, labels = FILE_COLUMN, replace(labels, columns=(LABEL_COLUMN,))
        table = table_of_folder(folder, labels)
    else:
        folder, table = folder_of(file, "FILE"), read_rows(request, [column], "--image_column_name")
    targets, scored = targets_of(request, labels, table)
    source = images_of(table, column, with_targets(labels, targets), folder)
    return source, without_bytes(table, column), scored


def columns_of_run(source: Images) -> pa.Table:
    """The first columns of the output for the validation images of a run."""
    if source.table is not None:
        return without_bytes(source.table, source.column).take(pa.array(source.rows))
    classes = pa.array(source.names).take(pa.array(source.targets))
    if source.folder:
        files = (os.fsencode(source.stored(i)).decode(errors="replace") for i in range(len(source)))
        places = {FILE_COLUMN: pa.array(files)}
    else:
        places = {NUMBER_COLUMN: pa.array(source.rows)}
    return named(pa.table(places | {LABEL_COLUMN: classes}), source.name)


def table_of_folder(folder: Path, labels: Labels) -> pa.Table:
    """The images of a folder and its subfolders, in the order of their paths; their labels are the subfolders, if any.

    Raises:
        UserError: there is no image, or a name is not UTF-8, as the output is.
    """
    name, passed_over = f"FILE {folder}", Counter[str]()
    inside = [*images_below(folder, name, passed_over, links=True)]
    if not inside:
        raise UserError(f"{name} has no image ({', '.join(EXTENSIONS)}): give a folder of images")
    say_passed_over(name, passed_over)
    classes = [path.partition("/")[0] if "/" in path else None for path in inside]
    columns = {FILE_COLUMN: inside} | ({LABEL_COLUMN: classes} if {*classes} & {*labels.names} else {})
    with about(name):
        return named(pa.table(columns), name)


def without_bytes(table: pa.Table, image_column: str) -> pa.Table:
    """The columns of a table of images without the images, if they are not paths."""
    return table if is_text(table.schema.field(image_column).type) else table.drop_columns([image_column])
