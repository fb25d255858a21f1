"""Predictions of an image classifier, or of regression on images, for a folder of images or a column of a file."""

import warnings
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from shared.augmentation.augmentation import Augmentation
from shared.datasets.labels import Labels
from shared.datasets.rows import named
from shared.datasets.tables import read_file, skip_incomplete
from shared.errors import UserError, count_of, listed
from shared.images.image_models import adapt_to_device, load_geometry
from shared.images.images import collate, prepare
from shared.images.paths import EXTENSIONS, images_below
from shared.images.sources import Source, folder_of, limited, load_sources, of_table
from shared.plan.batches import MicroBatch, evaluation_batches
from shared.predictions.labels import LabelOutputs, Mask, labels_of_model, targets_of
from shared.predictions.prediction import Prediction, build_model
from shared.predictions.request import Request

FILE_COLUMN, LABEL_COLUMN, NUMBER_COLUMN = "file", "label", "image"  # of images that are not in a table
MOST_RANKED = 5  # classes per image, for top-5 accuracy


class WithoutLabels(Labels):
    """Labels for `of_table` that read no column: every image has the first class."""

    def encode(self, table: pa.Table) -> np.ndarray:
        """int64 [N] zeros."""
        return np.zeros(table.num_rows, np.int64)


def predict_images(accelerator: Any, request: Request) -> Prediction:
    """The prediction of a folder of images, of --image_column_name of a file, or of the run's validation data.

    Raises:
        UserError: the model, an image or the labels cannot be used.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata, sizes and palettes
    config, labels, geometry = request.config, labels_of_model(request), load_geometry(request.config)
    model = build_model(request, labels.names)
    outputs = LabelOutputs(request, labels, min(MOST_RANKED, labels.num_labels))
    source, table, targets, scored = read_input(request, labels)
    data = prepare(source, config, geometry.evaluation_square)
    if len(data) < len(source):  # --skip_corrupt_images leaves some out
        kept = np.isin(source.rows, data.source.rows)
        table, targets, scored = table.filter(pa.array(kept)), targets[kept], scored[kept]
    data = replace(data, source=replace(data.source, targets=targets))
    score, notes = outputs.scorer(targets, scored)
    how = Augmentation.of_run(config, geometry)
    model = adapt_to_device(accelerator, config, model, geometry)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    predict_batch = partial(request.recipe.predict_batch, accelerator, how, model)

    def forward(micro_batch: MicroBatch, batch: dict[str, Tensor]) -> Tensor:
        return outputs.of_batch(*predict_batch(micro_batch, batch))

    return Prediction(
        table=table,
        data=data,
        collate=collate,
        batches=evaluation_batches(data.lengths, None, request.limits[1]),
        forward=forward,
        width=outputs.width,
        columns=outputs.columns,
        score=score,
        notes={"model": f"{request.model}: {labels}", "data": count_of(len(data), "image")} | notes,
    )


def read_input(request: Request, labels: Labels) -> tuple[Source, pa.Table, NDArray[Any], Mask]:
    """The images to predict, the rows of the output's first columns, the targets, and which are scored.

    Raises:
        UserError: the images cannot be read, or their labels are not those of the model.
    """
    config, column = request.config, request.config.image_column_name
    folder: Path | None
    file = request.file
    if file is None:
        _, source = limited(load_sources(config, labels.problem_type), config)
        if source.names != labels.names:
            raise UserError(f"the run's images now have other classes ({listed(source.names)}) than its model")
        return source, columns_of_run(source), source.targets, np.full(len(source), config.scores)
    if Path(file).is_dir():
        column, folder = FILE_COLUMN, Path(file)
        table = table_of_folder(folder, labels)
        labels = replace(labels, column=LABEL_COLUMN)
        request = replace(request, config=replace(config, label_column_name=LABEL_COLUMN))
    else:
        folder = folder_of(file, "FILE")
        table = read_file(file, "FILE", config.csv_delimiter)
        if config.skip_incomplete_rows:
            table = skip_incomplete(table, [column])
    source = of_table(table, column, WithoutLabels("classification", "", labels.names), folder)
    return source, without_bytes(table, column), *targets_of(request, labels, table)


def columns_of_run(source: Source) -> pa.Table:
    """The first columns of the output for the validation images of a run."""
    if source.table is not None:
        return without_bytes(source.table.take(pa.array(source.rows)), source.column)
    classes = pa.array(source.names).take(pa.array(source.targets))
    if source.paths:
        places = {FILE_COLUMN: pa.array([str(source.paths[row]) for row in source.rows])}
    else:
        places = {NUMBER_COLUMN: pa.array(source.rows)}
    return named(pa.table(places | {LABEL_COLUMN: classes}), source.name)


def table_of_folder(folder: Path, labels: Labels) -> pa.Table:
    """The images of a folder and its subfolders, in the order of their paths; their labels are the subfolders, if any.

    Raises:
        UserError: there is no image.
    """
    name = f"FILE {folder}"
    inside = [*images_below(folder, name, Counter[str]())]
    if not inside:
        raise UserError(f"{name} has no image ({', '.join(EXTENSIONS)}): give a folder of images")
    classes = [path.partition("/")[0] if "/" in path else None for path in inside]
    columns = {FILE_COLUMN: inside} | ({LABEL_COLUMN: classes} if {*classes} & {*labels.names} else {})
    return named(pa.table(columns), name)


def without_bytes(table: pa.Table, image_column: str) -> pa.Table:
    """The columns of a table of images without the images, if they are not paths."""
    type_ = table.schema.field(image_column).type
    is_path = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    return table if is_path else table.drop_columns([image_column])
