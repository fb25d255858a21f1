"""Computes predictions in parts, each complete or absent, and joins them into one file in the order of the input.

A part holds the outputs of some micro-batches. The cut into parts does not depend on the number of processes, and each
process writes the parts that it computes by itself. After a kill, the next start reads the parts that exist and
computes the others, on any number of processes. The name of a part has the digest of what it depends on.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import torch
from tqdm import tqdm

from shared.cache import division
from shared.cache.prepared import key_digest
from shared.checkpoints.folders import digest, lines_of
from shared.config import options
from shared.config.fields import Meaning, fields_with
from shared.datasets.readers import is_list
from shared.disk import sync
from shared.errors import UserError, about, aligned, count_of
from shared.monitoring.log import finite_or_name
from shared.plan.batches import MicroBatch
from shared.plan.loading import feed
from shared.predictions.onnx import FOLDER
from shared.predictions.prediction import BLOCK_ROWS, Outputs, Prediction
from shared.predictions.request import Request
from shared.processes import folder_lock
from shared.processes.collectives import gather, on_main_process

FLAG = "--predictions_file"
MOST_PARTS = 256  # a kill loses at most one part of each process
Record = dict[str, Any]
Parts = dict[Path, Sequence[MicroBatch]]  # the file of each part, which may not exist yet, and its forward passes


def predict_in_parts(accelerator: Any, request: Request, prediction: Prediction) -> Record:
    """Write the file of predictions and its record; return the record. Every process calls this.

    If the file holds the same predictions already, nothing is computed.

    Raises:
        UserError: the file holds other predictions or cannot be written, or an output is not finite.
    """
    task = on_main_process(accelerator, lambda: begin_or_find(request, prediction))
    if "scores" in task:
        accelerator.print(f"{request.output} holds these predictions already")
        return task
    parts = cut_into_parts(prediction.batches, request.parts_folder, key_digest(task))
    missing = on_main_process(accelerator, lambda: [file for file in parts if not file.exists()])
    rows = {**prediction.notes, "passes": f"{len(prediction.batches):,} in {count_of(len(parts), 'part')}"}
    if len(missing) < len(parts):
        rows["passes"] += f", of which {len(parts) - len(missing)} are computed already"
    if not prediction.score:
        rows["scores"] = f"none, {'because there are no labels' if request.config.scores else 'as requested'}"
    rows |= {"input": prediction.source, "recipe": str(request.recipe.__file__), "output": str(request.output)}
    accelerator.print(aligned(rows))
    mine = {file: parts[file] for file in missing[accelerator.process_index :: accelerator.num_processes]}
    compute(accelerator, prediction, mine, request.config.dataloader_num_workers)
    gather(accelerator, None)  # waits until all parts are written
    return on_main_process(accelerator, lambda: finish(request, prediction, parts, task))


def cut_into_parts(batches: Sequence[MicroBatch], folder: Path, digest_of_task: str) -> Parts:
    """The cut of all micro-batches into parts."""
    cut = division.parts_of(len(batches), 1 + len(batches) // MOST_PARTS)
    return {folder / f"part_{i.start:04}-{i.stop:04}_{digest_of_task}.npy": batches[i.start : i.stop] for i in cut}


def write_part(file: Path, outputs: Outputs) -> None:
    """Write the outputs of a part; the file is complete or absent."""
    partial = file.with_suffix(f".partial-{os.getpid()}.npy")
    with about(FLAG):
        np.save(partial, outputs)
        sync(partial)
        partial.rename(file)


@torch.inference_mode()
def compute(accelerator: Any, prediction: Prediction, mine: Parts, num_workers: int | None) -> None:
    """Compute and write the parts of this process. Every process calls this."""
    schedule = [micro_batch for batches in mine.values() for micro_batch in batches]
    model = accelerator.prepare_model(prediction.model, evaluation_mode=True)
    stream = feed(schedule, prediction.data, prediction.collate, accelerator.device, num_workers)
    rows = sum(len(micro_batch.samples) for micro_batch in schedule)
    hidden = None if accelerator.is_main_process else True  # None: it is shown in a terminal only
    bar = tqdm(total=rows, desc="predicting", unit=" samples", mininterval=0.5, disable=hidden)
    with closing(stream), bar:
        for file, batches in mine.items():
            outputs = []
            for micro_batch, batch in islice(stream, len(batches)):
                outputs.append(prediction.compute(model, micro_batch, batch))
                bar.update(len(micro_batch.samples))
            write_part(file, torch.cat(outputs).cpu().numpy())


def join(prediction: Prediction, parts: Parts, folder: Path) -> Outputs:
    """All outputs [M, width] in the order of the input, in a file of `folder` that is mapped into memory.

    Raises:
        UserError: an output other than a loss is not finite, or a part cannot be read: another machine may have it.
    """
    widths, bounds = prediction.widths, prediction.bounds
    with about(FLAG):
        outputs = np.lib.format.open_memmap(folder / "outputs.npy", "w+", np.float32, (bounds[-1], sum(widths)))
    for file, batches in parts.items():
        with about(f"{file} is missing or damaged: remove it and start again, in a folder that all machines share"):
            found = np.load(file, mmap_mode="r")
        numbers = np.concatenate([prediction.outputs_of(batch.samples) for batch in batches])
        outputs[numbers] = found
        predicted = np.delete(found, [widths[0]] if prediction.has_loss else [], axis=1)
        if len(wrong := numbers[~np.isfinite(predicted).all(1)]):
            row = np.searchsorted(bounds, wrong.min(), "right")  # counted from 1
            raise UserError(
                f"the prediction for row {row:,} of {prediction.source} is not finite: fill in what the row lacks, use "
                "--mixed_precision no, or a model whose weights are finite"
            )
    return outputs


def begin_or_find(request: Request, prediction: Prediction) -> Record:
    """What the predictions depend on; if their file is finished, its record, which has scores as well.

    Raises:
        UserError: the file holds other predictions, or it cannot hold the columns, or its folder is in use.
    """
    output, task = request.output, task_of(request, prediction)
    check_columns(prediction, output)
    if not output.exists():
        with about(FLAG):
            request.parts_folder.mkdir(parents=True, exist_ok=True)
            folder_lock.acquire(request.parts_folder, f"{FLAG}: the folder")
        return task
    record: Record = {}
    with suppress(OSError, ValueError):
        record = json.loads(request.record.read_text())
    now = task | {"bytes": output.stat().st_size}
    if changed := [name for name, value in now.items() if record.get(name) != value]:
        raise UserError(
            f"{FLAG} {output} exists with other content ({request.record.name} differs in {', '.join(changed)}): "
            "remove it, or name another file"
        )
    shutil.rmtree(request.parts_folder, ignore_errors=True)  # a kill may have left parts of it
    return record


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
        nested, bytes_in_it = pa.types.is_nested(field.type), has_bytes(field.type)
        if (nested and output.suffix == ".csv") or (bytes_in_it and output.suffix != ".parquet"):
            raise UserError(
                f"{FLAG} {output}: {output.suffix[1:]} cannot hold the column {field.name} of {source}, "
                f"which contains {field.type}: use a name that ends in .parquet"
            )


def has_bytes(kind: pa.DataType) -> bool:
    """Whether a type is bytes, or contains them."""
    if pa.types.is_nested(kind):
        return any(has_bytes(kind.field(place).type) for place in range(kind.num_fields))
    return "binary" in str(kind) or isinstance(kind, pa.BaseExtensionType)


def finish(request: Request, prediction: Prediction, parts: Parts, task: Record) -> Record:
    """Join the parts, compute the scores, write the file and its record, and remove the parts; return the record.

    Raises:
        UserError: an output is not finite, a part is missing, or a file cannot be written.
    """
    folder, rows = request.parts_folder, 0
    outputs = join(prediction, parts, folder)
    scores = prediction.score(*prediction.split(outputs)) if prediction.score else {}
    blocks = (prediction.blocks or prediction.with_columns)(outputs)
    first = next(blocks)
    file, described = (folder / place.name for place in (request.output, request.record))
    with about(FLAG):
        with writer(file, first.schema) as write_rows:
            for block in chain([first], blocks):
                write_rows(block)
                rows += block.num_rows
        record = task | {"rows": rows, "bytes": file.stat().st_size}
        record["scores"] = {name: finite_or_name(value) for name, value in scores.items()}
        described.write_text(json.dumps(record, indent=1) + "\n")
        for written, place in ((described, request.record), (file, request.output)):  # the predictions last
            sync(written)
            written.replace(place)
    folder_lock.release_all()
    shutil.rmtree(folder, ignore_errors=True)  # the predictions are complete
    return record


@contextmanager
def writer(file: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], object]]:
    """Open a CSV, JSON lines or Parquet file; gives a function that appends the rows of a table with this schema."""
    if file.suffix == ".jsonl":
        with file.open("w", encoding="utf-8") as stream:
            yield lambda table: stream.writelines(
                json.dumps(row, ensure_ascii=False, default=str) + "\n"
                for row in with_shortest_numbers(table).to_pylist()
            )
    else:
        kind = pyarrow.csv.CSVWriter if file.suffix == ".csv" else pyarrow.parquet.ParquetWriter
        with kind(file, schema) as opened:
            yield opened.write_table


def with_shortest_numbers(table: pa.Table) -> pa.Table:
    """`table` with float64 in place of float32: the number with the fewest digits that means the same float32."""
    for place, field in enumerate(table.schema):
        a_list = is_list(field.type)
        if pa.types.is_float32(field.type.value_type if a_list else field.type):
            text, number = (pa.large_list(type_) if a_list else type_ for type_ in (pa.string(), pa.float64()))
            table = table.set_column(place, field.name, table.column(place).cast(text).cast(number))
    return table


def task_of(request: Request, prediction: Prediction) -> Record:
    """What the predictions depend on: digests of model, recipe and input, and settings, independent of paths."""
    config = request.config
    left_out = fields_with(type(config), Meaning.NOT_IN_RESULT, Meaning.NAMES_DATA, Meaning.MAY_BE_ON_HUB)
    folders = [request.model, *([request.model / FOLDER] if config.runtime else [])]
    files = sorted(file for folder in folders for file in folder.iterdir() if file.is_file() and file.suffix != ".md")
    return {
        "model": key_digest(lines_of({file.name: file for file in files})),
        "recipe": digest(Path(str(request.recipe.__file__))),
        "input": input_digest(prediction),
        "settings": {name: value for name, value in options.plain(config).items() if name not in left_out},
    }


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
