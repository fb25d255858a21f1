"""Predictions of an image classifier, for a folder of images or a column of a file."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from shared.augmentation.augmentation import Augmentation
from shared.datasets.labels import Labels, ProblemType
from shared.datasets.rows import ROW_COLUMN
from shared.datasets.tables import read_file, skip_incomplete
from shared.errors import UserError, count_of, listed
from shared.images.image_models import adapt_to_device, load_geometry
from shared.images.images import Images, collate, prepare
from shared.images.paths import EXTENSIONS, Paths, images_below
from shared.images.sources import Source, checked, folder_of, limited, load_sources, of_table
from shared.plan.batches import evaluation_batches
from shared.predictions.labels import Task, scorer, targets_of
from shared.predictions.prediction import Prediction, load_trained
from shared.predictions.settings import ImageSettings
from shared.pretrained.from_pretrained import stored_names

FILE_COLUMN, NUMBER_COLUMN = "file", "image"  # of images that are not in a table
Found = tuple[np.ndarray, np.ndarray] | None  # the numbers and the targets of the images with labels


class WithoutLabels(Labels):
    """Labels for `of_table` that read no column: every image has the first class."""

    def encode(self, table: pa.Table) -> np.ndarray:
        """int64 [N] zeros."""
        return np.zeros(table.num_rows, np.int64)


def predict_images(accelerator: Any, settings: ImageSettings) -> Prediction:
    """The prediction of a folder of images, of --image_column_name of a file, or of the run's validation data.

    Raises:
        UserError: the model, an image or the labels cannot be used.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about unusual metadata, sizes and palettes
    folder = str(settings.model_name_or_path)
    model, geometry = load_trained("AutoModelForImageClassification", folder), load_geometry(settings)
    task = Task.of_model(model.config, stored_names(folder), settings)
    source, table, found = read_input(settings, task)
    data = prepare(source, settings, geometry.evaluation_square)
    table, found = without_corrupt(source, data, table, found)
    score, notes = scorer(task, settings, found, len(data), images=True)
    how = Augmentation.of_run(settings, geometry)
    model = adapt_to_device(accelerator, settings, model, geometry).to(accelerator.device)

    def forward(batch: dict[str, Tensor]) -> Tensor:
        images = how.evaluation(batch)
        with accelerator.autocast():
            return model(pixel_values=images).logits.float()

    return Prediction(
        table=table,
        source=source.name,
        data=data,
        collate=collate,
        batches=evaluation_batches(data.lengths, None, settings.per_device_eval_batch_size),
        forward=forward,
        width=task.width,
        columns=lambda _, outputs: task.columns(outputs),
        score=score,
        notes={"model": f"{folder}: {task}", "data": f"{source.name}: {count_of(len(data), 'image')}"} | notes,
    )


def read_input(settings: ImageSettings, task: Task) -> tuple[Source, pa.Table, Found]:
    """The images to predict, the rows of the output's first columns, and the targets of those with labels.

    Raises:
        UserError: the images cannot be read, or their labels are not those of the model.
    """
    if settings.input_file is None:
        return of_run(settings, task)
    if Path(settings.input_file).is_dir():
        return of_folder(settings, task)
    table = read_file(settings.input_file, "FILE", settings.csv_delimiter)
    if settings.skip_incomplete_rows:
        table = skip_incomplete(table, [settings.image_column_name])
    labels = WithoutLabels("classification", "", task.names)
    source = of_table(table, settings.image_column_name, labels, folder_of(settings.input_file, "FILE"))
    return source, columns_of(table, settings.image_column_name), targets_of(task, table, settings)


def of_run(settings: ImageSettings, task: Task) -> tuple[Source, pa.Table, Found]:
    """`read_input` for the validation images of the run."""
    problem_type: ProblemType = "regression" if task.kind == "regression" else "single_label_classification"
    _, source = limited(load_sources(settings, problem_type), settings)
    if source.names and source.names != task.names:
        raise UserError(f"the run's images now have other classes ({listed(source.names)}) than its model: give a FILE")
    found = (np.arange(len(source)), source.targets) if settings.scores else None
    if source.table is not None:
        return source, columns_of(source.table.take(pa.array(source.rows)), source.column), found
    classes = pa.array(source.names).take(pa.array(source.targets))
    if source.paths:
        places = pa.array([str(source.paths[row]) for row in source.rows])
        return source, pa.table({FILE_COLUMN: places, "label": classes}), found
    return source, pa.table({NUMBER_COLUMN: source.rows, "label": classes}), found


def of_folder(settings: ImageSettings, task: Task) -> tuple[Source, pa.Table, Found]:
    """`read_input` for a folder: its images and those in its subfolders, in the order of their paths.

    If the folder has a subfolder for each class, these are the labels.
    """
    root, name, passed_over = Path(str(settings.input_file)), f"FILE {settings.input_file}", Counter[str]()
    inside = [*images_below(root, name, passed_over)]
    if not inside:
        raise UserError(f"{name} has no image ({', '.join(EXTENSIONS)}): give a folder of images")
    columns, found = {FILE_COLUMN: pa.array(inside)}, None
    classes = [path.partition("/")[0] if "/" in path else "" for path in inside]
    if {*classes} & {*task.names}:
        unknown = sorted({*classes} - {*task.names})
        if unknown and settings.scores:
            raise UserError(
                f"{name} has subfolders of classes and also {unknown[0] or 'images outside of them'}, which the model "
                f"does not know (classes: {listed(task.names)}): move these images, or use --no_scores"
            )
        if not unknown:
            columns["label"] = pa.array(classes)
        if settings.scores:
            found = np.arange(len(inside)), np.array([task.names.index(each) for each in classes])
    zeros = np.zeros(len(inside), np.int64)
    source = Source(name, task.names, zeros, np.arange(len(inside)), paths=Paths.of(root, lambda: inside))
    return checked(source), pa.table(columns), found


def columns_of(table: pa.Table, image_column: str) -> pa.Table:
    """The columns of a table of images for the output: without row numbers, and without the images as bytes."""
    type_ = table.schema.field(image_column).type
    left_out = [ROW_COLUMN] if ROW_COLUMN in table.column_names else []
    if not (pa.types.is_string(type_) or pa.types.is_large_string(type_)):
        left_out.append(image_column)
    return table.drop_columns(left_out)


def without_corrupt(source: Source, data: Images, table: pa.Table, found: Found) -> tuple[pa.Table, Found]:
    """The rows and the targets of the images that --skip_corrupt_images keeps, which are those of `data`."""
    if len(data) == len(source):
        return table, found
    kept = np.isin(source.rows, data.source.rows)
    if found is not None:
        numbers, targets = found
        found = (np.cumsum(kept) - 1)[numbers[kept[numbers]]], targets[kept[numbers]]
    return table.filter(pa.array(kept)), found
