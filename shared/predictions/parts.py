"""Computes predictions in parts, each complete or absent, and joins them into one file in the order of the input.

A part holds the outputs of some micro-batches. The cut into parts does not depend on the number of processes, and each
process writes the parts that it computes by itself. After a kill, the next start reads the parts that exist and
computes the others, on any number of processes.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from shared.config import options
from shared.config.fields import Meaning, fields_with
from shared.disk import remedy, replace_file, sync
from shared.errors import UserError, count_of
from shared.monitoring.log import finite_or_name
from shared.onnx_models.runtime import FOLDER
from shared.plan.loading import feed
from shared.predictions.output import parts_folder, record_file, writer
from shared.predictions.prediction import Outputs, Prediction
from shared.predictions.request import Request
from shared.processes import folder_lock
from shared.processes.collectives import gather, on_main_process

MOST_PARTS = 256  # a kill loses at most one part of each process
BLOCK_ROWS = 1 << 16  # rows of the file that are written at once
TASK_FILE, OUTPUTS_FILE = "task.json", "outputs.npy"  # in the folder of the parts
Record = dict[str, Any]


class Parts:
    """The parts of a prediction, in the folder beside `output`."""

    def __init__(self, prediction: Prediction, output: Path) -> None:
        self.prediction, self.folder = prediction, parts_folder(output)
        batches = prediction.batches
        ends = np.linspace(0, len(batches), min(MOST_PARTS, len(batches)) + 1).astype(int)
        self.batches = [batches[start:end] for start, end in pairwise(ends)]

    def __len__(self) -> int:
        return len(self.batches)

    def numbers(self, part: int) -> NDArray[np.int64]:
        """The numbers of the outputs of a part, in their order in its file."""
        return np.concatenate([self.prediction.outputs_of(batch.samples) for batch in self.batches[part]])

    def path(self, part: int) -> Path:
        """The file of a part, which may not exist yet."""
        return self.folder / f"part_{part:04d}.npy"

    def read(self, part: int) -> Outputs | None:
        """The outputs [n, width] of a part; None if it does not exist or is damaged."""
        try:
            outputs: Outputs = np.load(self.path(part), mmap_mode="r")
        except (OSError, ValueError):
            return None
        return outputs if outputs.shape == (len(self.numbers(part)), sum(self.prediction.widths)) else None

    def write(self, part: int, outputs: Outputs) -> None:
        """Write the outputs of a part; the file is complete or absent."""
        partial = self.path(part).with_suffix(f".partial-{os.getpid()}")
        with writing(self.folder):
            with partial.open("wb") as file:
                np.save(file, outputs)
            sync(partial)
            partial.rename(self.path(part))

    def open(self, task: Record) -> list[int]:
        """Make the folder, or check that it holds parts of the same task; return the parts that are missing.

        Raises:
            UserError: the folder holds parts of another task, is in use, or cannot be written.
        """
        file = self.folder / TASK_FILE
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            folder_lock.acquire(self.folder, "--predictions_file: the folder")
            if not file.exists():
                replace_file(file, json.dumps(task, indent=1) + "\n")
        if changed := changes(read_json(file), task):
            raise UserError(
                f"{self.folder} holds parts of other predictions ({changed}): restore what was changed to resume, "
                "remove the folder to begin again, or name another --predictions_file"
            )
        return [part for part in range(len(self)) if self.read(part) is None]

    @torch.inference_mode()
    def compute(self, accelerator: Any, missing: Sequence[int], num_workers: int) -> None:
        """Compute and write this process's share of the `missing` parts. Every process calls this."""
        mine = missing[accelerator.process_index :: accelerator.num_processes]
        schedule = [micro_batch for part in mine for micro_batch in self.batches[part]]
        prediction = self.prediction
        model = accelerator.prepare_model(prediction.model, evaluation_mode=True)
        stream = feed(schedule, prediction.data, prediction.collate, accelerator.device, num_workers)
        rows = sum(len(micro_batch.samples) for micro_batch in schedule)
        hidden = None if accelerator.is_main_process else True  # None: it is shown in a terminal only
        bar = tqdm(total=rows, desc="predicting", unit=" samples", mininterval=0.5, disable=hidden)
        with closing(stream), bar:
            for part in mine:
                outputs = []
                for micro_batch, batch in islice(stream, len(self.batches[part])):
                    outputs.append(prediction.compute(model, micro_batch, batch))
                    bar.update(len(micro_batch.samples))
                self.write(part, torch.cat(outputs).cpu().numpy())

    def join(self) -> Outputs:
        """All outputs [M, width] in the order of the input, in a file that is mapped into memory.

        Raises:
            UserError: a part is missing, because another machine wrote it to its own disk.
        """
        shape = int(self.prediction.bounds[-1]), sum(self.prediction.widths)
        outputs = np.lib.format.open_memmap(self.folder / OUTPUTS_FILE, "w+", np.float32, shape)
        for part in range(len(self)):
            if (found := self.read(part)) is None:
                raise UserError(
                    f"{self.path(part)} is missing, because another machine wrote it to its own disk: give a "
                    "--predictions_file in a folder that all machines share"
                )
            outputs[self.numbers(part)] = found
        return outputs


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an error in writing to `folder` into a `UserError` that says what helps."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--predictions_file: {folder} cannot be written ({error}): {remedy(error)}, and start again to resume"
        ) from error


def run(accelerator: Any, request: Request, prediction: Prediction) -> Record:
    """Write the file of predictions and its record; return the record. Every process calls this.

    If the file holds the same predictions already, nothing is computed.

    Raises:
        UserError: the file holds other predictions or cannot be written, or an output is not finite.
    """
    output, parts = request.output, Parts(prediction, request.output)

    def begin() -> tuple[Record, list[int], bool]:
        """The record, the missing parts, and whether the file is finished."""
        task = task_of(request, prediction)
        check_columns(prediction, output)
        if not output.exists():
            return task, parts.open(task), False
        record = read_json(record_file(output))
        changed = changes(record, task) if record else "there is no record of its predictions"
        if not changed and output.stat().st_size != record["bytes"]:
            changed = "the file has changed"
        if changed:
            raise UserError(
                f"--predictions_file {output} exists with other content ({changed}): remove it, or name another file"
            )
        return record, [], True

    task, missing, is_finished = on_main_process(accelerator, begin)
    if is_finished:
        accelerator.print(f"{output} holds these predictions already")
        return task
    rows = {**prediction.notes, "passes": f"{len(prediction.batches):,} in {count_of(len(parts), 'part')}"}
    if len(missing) < len(parts):
        rows["passes"] += f", of which {len(parts) - len(missing)} are computed already"
    if not prediction.score:
        why = f"because there are no {prediction.labels}" if request.config.scores else "as requested"
        rows["scores"] = f"none, {why}"
    rows |= {"input": prediction.source, "recipe": str(request.recipe.__file__), "output": str(output)}
    width = max(map(len, rows))
    accelerator.print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()))
    workers = request.config.dataloader_num_workers
    on_cpu = accelerator.device.type == "cpu"
    parts.compute(accelerator, missing, workers if workers is not None else 0 if on_cpu else 2)
    gather(accelerator, None)  # waits until all parts are written
    return on_main_process(accelerator, lambda: finish(parts, output, task))


def check_columns(prediction: Prediction, output: Path) -> None:
    """Check that the file can hold the columns of the input and the new ones.

    Raises:
        UserError: a column would exist twice, or the format cannot hold a column.
    """
    table, source = prediction.table, prediction.source
    new = prediction.columns(table.slice(0, 0), *(np.zeros((0, width), np.float32) for width in prediction.widths))
    if both := [name for name in table.column_names if name in new]:
        raise UserError(f"{source} has a column {both[0]}, as the predictions have: rename it in the input")
    for field in table.schema:
        binary = pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type)
        if (pa.types.is_nested(field.type) and output.suffix == ".csv") or (binary and output.suffix != ".parquet"):
            raise UserError(
                f"--predictions_file {output}: {output.suffix[1:]} cannot hold the column {field.name} of {source}, "
                f"which contains {field.type}: use a name that ends in .parquet"
            )


def finish(parts: Parts, output: Path, task: Record) -> Record:
    """Join the parts, compute the scores, write the file and its record, and remove the parts; return the record.

    Raises:
        UserError: an output is not finite, a part is missing, or a file cannot be written.
    """
    prediction, file = parts.prediction, parts.folder / output.name
    with writing(parts.folder):
        outputs = parts.join()
        blocks = prediction.blocks(outputs) if prediction.blocks else with_columns(prediction, outputs)
        first, rows = next(blocks), 0
        with writer(file, output, first.schema) as write:
            for block in chain([first], blocks):
                write(block)
                rows += block.num_rows
        scores = prediction.score(*prediction.split(outputs)) if prediction.score else {}
        record = task | {"rows": rows, "bytes": file.stat().st_size}
        record["scores"] = {name: finite_or_name(value) for name, value in scores.items()}
        described = parts.folder / record_file(output).name
        described.write_text(json.dumps(record, indent=1) + "\n")
        for written, place in ((described, record_file(output)), (file, output)):  # the predictions last
            sync(written)
            written.replace(place)
    folder_lock.release_all()
    shutil.rmtree(parts.folder)
    return record


def with_columns(prediction: Prediction, outputs: Outputs) -> Iterator[pa.Table]:
    """Yield blocks of the table with the columns of the predictions.

    Raises:
        UserError: an output is not finite; names the row.
    """
    bounds = prediction.bounds
    for start in range(0, prediction.table.num_rows, BLOCK_ROWS):
        block = prediction.table.slice(start, BLOCK_ROWS)
        found = outputs[bounds[start] : bounds[start + block.num_rows]]
        refuse_infinite(prediction, found, start)
        for name, column in prediction.columns(block, *prediction.split(found)).items():
            block = block.append_column(name, column)
        yield block.cast(pa.schema([field.remove_metadata() for field in block.schema]))


def refuse_infinite(prediction: Prediction, outputs: Outputs, start: int) -> None:
    """Raise UserError if an output of the rows from `start` is not finite; names the row. A loss may be infinite."""
    found, bounds = prediction.split(outputs), prediction.bounds
    predicted = [output for place, output in enumerate(found) if place != 1 or not prediction.has_loss]
    if len(wrong := np.flatnonzero(~np.all([np.isfinite(output).all(1) for output in predicted], axis=0))):
        row = np.searchsorted(bounds, bounds[start] + wrong[0], "right")  # counted from 1
        raise UserError(
            f"the prediction for row {row:,} of {prediction.source} is not finite: use "
            "--mixed_precision no and another --predictions_file, or a model whose weights are finite"
        )


def task_of(request: Request, prediction: Prediction) -> Record:
    """What the predictions depend on: digests of model, recipe and input, and settings, independent of paths."""
    config = request.config
    left_out = fields_with(type(config), Meaning.NOT_IN_RESULT, Meaning.NAMES_DATA, Meaning.MAY_BE_ON_HUB)
    folders = [request.model, *([request.model / FOLDER] if config.runtime else [])]
    files = [file for folder in folders for file in folder.iterdir() if file.is_file() and file.suffix != ".md"]
    model = "".join(file.name + digest_of(file) for file in sorted(files))
    return {
        "model": hashlib.sha256(model.encode()).hexdigest(),
        "recipe": digest_of(Path(str(request.recipe.__file__))),
        "input": input_digest(prediction),
        "settings": {name: value for name, value in options.plain(config).items() if name not in left_out},
    }


def digest_of(file: Path) -> str:
    """A digest of the content of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def input_digest(prediction: Prediction) -> str:
    """A digest of what the model reads, its cut into forward passes, and the columns of the input."""
    content = hashlib.blake2b(prediction.data.digest().encode(), digest_size=16)
    for micro_batch in prediction.batches:
        content.update(b"forward pass" + micro_batch.samples.tobytes())
    content.update("\0".join(prediction.table.column_names).encode())
    for start in range(0, prediction.table.num_rows, BLOCK_ROWS):
        for batch in prediction.table.slice(start, BLOCK_ROWS).combine_chunks().to_batches():
            content.update(batch.serialize())
    return content.hexdigest()


def read_json(file: Path) -> Record:
    """The content of a JSON file; {} if it is malformed or does not exist."""
    try:
        found: Record = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found


def changes(stored: Record, task: Record) -> str:
    """In words, what differs between the stored and this task: model, recipe, input, a setting; "" if nothing."""
    before, after = stored.get("settings", {}), task["settings"]
    words = [f"the {name} has changed" for name in ("model", "recipe", "input") if stored.get(name) != task[name]]
    words += [
        f"--{name} was {options.shown(before.get(name))}, is {options.shown(after[name])}"
        for name in after
        if before.get(name) != after[name]
    ]
    return ", ".join(words)
