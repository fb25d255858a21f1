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
from contextlib import closing
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from shared.config import options
from shared.disk import sync
from shared.errors import UserError, count_of
from shared.monitoring.log import finite_or_name
from shared.plan.loading import feed
from shared.predictions.output import check_columns, parts_folder, record_file, writer
from shared.predictions.prediction import Outputs, Prediction
from shared.predictions.settings import PredictionOptions
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
        return outputs if outputs.shape == (len(self.numbers(part)), self.prediction.width) else None

    def write(self, part: int, outputs: Outputs) -> None:
        """Write the outputs of a part; the file is complete or absent."""
        partial = self.path(part).with_suffix(f".partial-{os.getpid()}")
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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            folder_lock.acquire(self.folder, "--predictions_file: the folder")
            if not file.exists():
                partial = file.with_suffix(".partial")
                partial.write_text(json.dumps(task, indent=1) + "\n")
                partial.rename(file)
        except OSError as error:
            raise UserError(
                f"--predictions_file: {self.folder} cannot be written ({error.strerror}): name a file in another folder"
            ) from None
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
        schedule = (micro_batch for part in mine for micro_batch in self.batches[part])
        prediction = self.prediction
        stream = feed(schedule, prediction.data, prediction.collate, accelerator.device, num_workers)
        rows = sum(len(micro_batch.samples) for part in mine for micro_batch in self.batches[part])
        hidden = None if accelerator.is_main_process else True  # None: it is shown in a terminal only
        bar = tqdm(total=rows, desc="predicting", unit=" samples", mininterval=0.5, disable=hidden)
        with closing(stream), bar:
            for part in mine:
                outputs = []
                for micro_batch, batch in islice(stream, len(self.batches[part])):
                    outputs.append(prediction.forward(batch))
                    bar.update(len(micro_batch.samples))
                self.write(part, torch.cat(outputs).cpu().numpy())

    def join(self) -> Outputs:
        """All outputs [M, width] in the order of the input, in a file that is mapped into memory.

        Raises:
            UserError: a part is missing, because another machine wrote it to its own disk.
        """
        shape = int(self.prediction.bounds[-1]), self.prediction.width
        outputs = np.lib.format.open_memmap(self.folder / OUTPUTS_FILE, "w+", np.float32, shape)
        for part in range(len(self)):
            if (found := self.read(part)) is None:
                raise UserError(
                    f"{self.path(part)} is missing, because another machine wrote it to its own disk: give a "
                    "--predictions_file in a folder that all machines share"
                )
            outputs[self.numbers(part)] = found
        return outputs


def check_free(output: Path) -> None:
    """Check that `output` does not exist, unless predictions are described in the file beside it.

    Raises:
        UserError: it exists.
    """
    if output.exists() and not record_file(output).exists():
        raise UserError(f"--predictions_file {output} exists: remove it, or name another file")


def run(accelerator: Any, settings: PredictionOptions, prediction: Prediction) -> Record:
    """Write the file of predictions and its record; return the record. Every process calls this.

    If the file holds the same predictions already, nothing is computed.

    Raises:
        UserError: the file holds other predictions or cannot be written, or an output is not finite.
    """
    output = Path(settings.predictions_file)
    new = [*prediction.columns(prediction.table.slice(0, 0), np.zeros((0, prediction.width), np.float32))]
    task = on_main_process(accelerator, lambda: task_of(accelerator, settings, prediction))

    def finished() -> Record | None:
        check_columns(prediction.table, new, prediction.source, output)
        if not output.exists():
            return None
        record: Record = read_json(record_file(output))
        changed = changes(record, task) or ("the file has changed" if output.stat().st_size != record["bytes"] else "")
        if changed:
            raise UserError(
                f"--predictions_file {output} holds other predictions ({changed}): remove it, or name another file"
            )
        return record

    if record := on_main_process(accelerator, finished):
        accelerator.print(f"{output} holds these predictions already")
        return record
    parts = Parts(prediction, output)
    missing = on_main_process(accelerator, lambda: parts.open(task))
    rows = {**prediction.notes, "passes": f"{len(prediction.batches):,} in {count_of(len(parts), 'part')}"}
    if len(missing) < len(parts):
        rows["passes"] += f", of which {len(parts) - len(missing)} are computed already"
    rows["output"] = str(output)
    width = max(map(len, rows))
    accelerator.print("\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items()))
    workers = settings.dataloader_num_workers
    on_cpu = accelerator.device.type == "cpu"
    parts.compute(accelerator, missing, workers if workers is not None else 0 if on_cpu else 2)
    gather(accelerator, None)  # waits until all parts are written
    return on_main_process(accelerator, lambda: finish(parts, output, task))


def finish(parts: Parts, output: Path, task: Record) -> Record:
    """Join the parts, compute the scores, write the file and its record, and remove the parts; return the record.

    Raises:
        UserError: an output is not finite, or a part is missing.
    """
    prediction, outputs = parts.prediction, parts.join()
    table = prediction.table.replace_schema_metadata(None)
    file = parts.folder / output.name
    blocks = with_columns(prediction, table, outputs)
    first = next(blocks)
    with writer(file, output, first.schema) as write:
        write(first)
        for block in blocks:
            write(block)
    scores = prediction.score(outputs) if prediction.score else {}
    record = task | {"rows": table.num_rows, "bytes": file.stat().st_size}
    record["scores"] = {name: finite_or_name(value) for name, value in scores.items()}
    described = parts.folder / record_file(output).name
    described.write_text(json.dumps(record, indent=1) + "\n")
    for written, place in ((described, record_file(output)), (file, output)):  # the predictions last
        sync(written)
        written.replace(place)
    folder_lock.release_all()
    shutil.rmtree(parts.folder)
    return record


def with_columns(prediction: Prediction, table: pa.Table, outputs: Outputs) -> Iterator[pa.Table]:
    """Yield blocks of the table with the columns of the predictions.

    Raises:
        UserError: an output is not finite; names the row.
    """
    bounds = prediction.bounds
    for start in range(0, table.num_rows, BLOCK_ROWS):
        block = table.slice(start, BLOCK_ROWS)
        part = outputs[bounds[start] : bounds[start + block.num_rows]]
        if len(wrong := np.flatnonzero(~np.isfinite(part).all(1))):
            row = np.searchsorted(bounds, bounds[start] + wrong[0], "right")  # counted from 1
            raise UserError(
                f"the prediction for row {row:,} of {prediction.source} is not finite: use "
                "--mixed_precision no and another --predictions_file, or a model whose weights are finite"
            )
        for name, column in prediction.columns(block, part).items():
            block = block.append_column(name, column)
        yield plain_fields(block)


def plain_fields(table: pa.Table) -> pa.Table:
    """`table` without the metadata of its columns."""
    return table.cast(pa.schema([field.remove_metadata() for field in table.schema]))


def task_of(accelerator: Any, settings: PredictionOptions, prediction: Prediction) -> Record:
    """What the predictions depend on: digests of model and input, and settings, independent of paths."""
    chosen = {name: options.plain(settings)[name] for name in settings.AFFECT_PREDICTIONS}
    chosen["mixed_precision"] = accelerator.mixed_precision
    model = hashlib.blake2b(digest_size=16)
    for file in sorted(Path(str(settings.model_name_or_path)).iterdir()):
        if file.is_file() and file.suffix != ".md":
            model.update(file.name.encode())
            with file.open("rb") as opened:
                model.update(hashlib.file_digest(opened, "sha256").digest())
    return {"model": model.hexdigest(), "input": input_digest(prediction), "settings": chosen}


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
    """The content of a JSON file; {} if it is malformed."""
    try:
        found: Record = json.loads(file.read_text())
    except ValueError:
        return {}
    return found


def changes(stored: Record, task: Record) -> str:
    """In words, what differs between the stored and this task: the model, the input, a setting; "" if nothing."""
    before, after = stored.get("settings", {}), task["settings"]
    words = [f"the {name} has changed" for name in ("model", "input") if stored.get(name) != task[name]]
    words += [
        f"--{name} was {options.shown(before.get(name))}, is {options.shown(after[name])}"
        for name in after
        if before.get(name) != after[name]
    ]
    return ", ".join(words)
