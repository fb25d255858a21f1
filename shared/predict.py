"""Predict a file with a trained model: a file with the columns of the input, predictions and probabilities.

    python -m shared.predict OUTPUT_DIR FILE [FLAGS]
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m shared.predict OUTPUT_DIR FILE [FLAGS]

OUTPUT_DIR is the folder of a finished run of any recipe except recipes/mlm.py, or a folder that save_pretrained wrote.
FILE is a file of any kind that the recipe reads; for images also a folder. Without FILE, the run's own validation data
are predicted, so that the printed scores are those of the run's last evaluation.

The file is complete or absent, and the same on any number of processes. Start an interrupted command again to resume.
"""

import dataclasses
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from shared.checkpoints.progress import Progress
from shared.config import command_line
from shared.config.limits import CanBeZero
from shared.errors import UserError, count_of
from shared.launch import environment, starting
from shared.plan.loading import current_batch
from shared.predictions import parts
from shared.predictions.embeddings import predict_embeddings
from shared.predictions.images import predict_images
from shared.predictions.prediction import Prediction
from shared.predictions.settings import (
    BUDGET,
    EmbeddingSettings,
    ImageSettings,
    PredictionOptions,
    Settings,
    TagSettings,
    TextSettings,
    settings_of,
)
from shared.predictions.tags import predict_tags
from shared.predictions.texts import predict_texts
from shared.processes import folder_lock
from shared.processes.collectives import on_main_process
from shared.run.command import run
from shared.run.out_of_memory import ran_out
from shared.run.same_run import refuse_changed_data

USAGE = "python -m shared.predict OUTPUT_DIR [FILE] [FLAGS]"
KINDS: dict[type, Callable[[Any, Any], Prediction]] = {
    TextSettings: predict_texts,
    ImageSettings: predict_images,
    TagSettings: predict_tags,
    EmbeddingSettings: predict_embeddings,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags. Where None is the default, the setting of the run is used, unless the text says otherwise."""

    predictions_file: str | None = None
    """File to write: .csv, .jsonl or .parquet. None: OUTPUT_DIR/predictions/NAME, in the format of FILE."""
    text_column_names: tuple[str, ...] | None = None
    """Column of the texts, or the two columns of text pairs; for embeddings, one or more columns."""
    text_column_name: str | None = None
    """For token classification: column of the words of each text (lists), or of texts."""
    image_column_name: str | None = None
    """Column of the images in a file. It contains bytes, or paths relative to the file's folder."""
    label_column_name: tuple[str, ...] | None = None
    """Column or columns of labels, or the column of the tags. If FILE has them, scores are computed."""
    label_delimiter: str | None = None
    """Separator between several labels in the label column, and in the predictions of a CSV file."""
    csv_delimiter: str | None = None
    """Column separator of .csv and .tsv files."""
    scores: bool | None = None
    """Compute scores if there are labels. None: True."""
    skip_incomplete_rows: bool | None = None
    """Leave out rows without text or image, and print how many. None: such a row of FILE is an error."""
    skip_corrupt_images: bool | None = None
    """Leave out images that cannot be decoded, and list them. None: such an image of FILE is an error."""
    max_length: int | None = None
    """Maximum number of tokens of a text or pair; further ones are cut off. For tags: maximum length of a window."""
    stride: CanBeZero | None = None
    """For token classification: number of tokens that consecutive windows of a long text share."""
    max_tokens_per_micro_batch: int | None = None
    """Maximum number of tokens in a forward pass, padding included. None: twice that of the run, or 4,096."""
    per_device_eval_batch_size: int | None = None
    """Maximum number of samples in a forward pass. None: twice that of the run's micro-batches."""
    mixed_precision: Literal["launcher", "no", "fp16", "bf16"] | None = None
    """Precision of the forward passes. None: that of accelerate launch, or float32 without it."""
    dataloader_num_workers: int | None = None
    """Data loader workers per process. None: 2 with an accelerator, 0 on a CPU."""


def parse(argv: Sequence[str]) -> Settings:
    """The settings of a command line: OUTPUT_DIR [FILE] [FLAGS].

    Raises:
        UserError: an argument is missing, unknown or wrong.
    """
    places = next((place for place, word in enumerate(argv) if word.startswith("-")), len(argv))
    values: dict[str, object] = {}
    for layer in command_line.layers(Flags, argv[places:]):
        values |= layer
    if places not in (1, 2):
        raise UserError(f"expected a folder and at most one file, then the flags: {USAGE}")
    return settings_of(Path(argv[0]), argv[1] if places == 2 else None, values)


def predict(settings: PredictionOptions) -> dict[str, float]:
    """Predict and return the scores by name; {} without labels. Every process calls this.

    Raises:
        UserError: the input, the model or the launch cannot be used.
    """
    if environment.uses_fsdp(os.environ):
        raise UserError(
            "distributed_type FSDP: predictions need the whole model on each device: use "
            "accelerate_configs/multi_gpu.yaml"
        )
    with folder_lock.freed_after(settings.output_dir):
        accelerator = starting.start(settings)
        settings = dataclasses.replace(settings, mixed_precision=accelerator.mixed_precision)
        on_main_process(accelerator, lambda: parts.check_free(Path(settings.predictions_file)))
        try:
            prediction = KINDS[type(settings)](accelerator, settings)
            refuse_changed_data(accelerator, Progress(), settings, prediction.data)
            record = parts.run(accelerator, settings, prediction)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"the disk is full ({error}): free space and start again to resume") from None
        except Exception as error:
            if not ran_out(error):
                raise
            raise UserError(out_of_memory(settings)) from error
    scores = {name: float(value) for name, value in record["scores"].items()}  # the record has NaN as a name
    shown = "".join(f"  {name} {value:.4g}" for name, value in scores.items())
    accelerator.print(f"{settings.predictions_file}: {count_of(record['rows'], 'row')}{shown}")
    return scores


def out_of_memory(settings: PredictionOptions) -> str:
    """The error of a process that ran out of memory: the shape of its batch, and the flag to lower."""
    limits = [f"--{name} {value}" for name in BUDGET if (value := getattr(settings, name, None))]
    where = f" on a batch of {current_batch.shape}" if current_batch.shape else ""
    return f"process {os.environ.get('RANK', 0)} ran out of memory{where}: lower {' or '.join(limits)}"


if __name__ == "__main__":
    run(predict, PredictionOptions, lambda _: parse(sys.argv[1:]))
