"""Export a trained model to ONNX, and check that onnxruntime computes the same with it as PyTorch.

    python -m shared.export OUTPUT_DIR [FILE] [FLAGS]
    python -m shared.export OUTPUT_DIR --int8

OUTPUT_DIR is the folder of a finished run, its folder model/, or a folder that save_pretrained wrote. The command
writes onnx/model.onnx into the folder of the model: classifiers, regression, token classification, and embeddings with
their pooling and normalization. The number of rows and the length of texts are free. --int8 rounds the weights.

FILE has the data of the check, as for `python -m shared.predict`. Without FILE, they are the run's own validation data.
The command prints differences, scores, sizes and speeds, and adds them to the model card. If the float32 file does not
compute the same, nothing is written.
"""

import dataclasses
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shared.disk import replace_file
from shared.errors import UserError, count_of
from shared.extras.hub import CARD
from shared.plan.loading import feed
from shared.predict import prediction_of
from shared.predictions.onnx import FILE, FOLDER, PACKAGES, OnnxModel, require, to_onnx, write_int8
from shared.predictions.prediction import Prediction
from shared.predictions.request import ModelFlags, Request, parse_request
from shared.processes import folder_lock, starting
from shared.run.export import write_folder
from shared.run.recipes import run_work
from shared.speed.first_token import shorten_last_layer

TOLERANCE = 1e-3  # relative to the largest logit, in float32; rounding causes a hundredth of it
PYTORCH, ONNX, INT8 = "PyTorch", "ONNX", "ONNX, int8"  # the columns of the table
HEADING = "## ONNX"
Figures = dict[str, dict[str, float]]  # by name, then by column


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportFlags(ModelFlags):
    """The flags that only this command has."""

    int8: bool = False
    """Dynamic quantization: weights in 8 bits, activations rounded to 8 bits in each forward pass."""


class Measured(nn.Module):
    """Calls a model; keeps the seconds that it took, and the inputs and logits of its last batch."""

    def __init__(self, model: nn.Module, normalize: bool) -> None:
        super().__init__()
        self.model, self.normalize, self.seconds = model, normalize, 0.0
        self.inputs: dict[str, Tensor] = {}
        self.logits = torch.empty(0)

    def forward(self, **inputs: Tensor) -> Any:
        """The output of the model."""
        self.inputs = inputs
        began = time.perf_counter()
        output = self.model(**inputs)
        self.seconds += time.perf_counter() - began
        self.logits = F.normalize(output.logits, dim=1) if self.normalize else output.logits
        return output


def parse_export(argv: Sequence[str]) -> Request:
    """What a command line asks for: see `parse_request`; OUTPUT_DIR may also be the folder model/ of a run.

    Raises:
        UserError: see `parse_request` and `as_onnx`; or the export is there already, or is not possible.
    """
    first = Path(*argv[:1])
    if first.name == "model" and (first.parent / "config.yaml").is_file():
        argv = [str(first.parent), *argv[1:]]
    request = parse_request(argv, ExportFlags).as_onnx()
    if (request.model / FOLDER).exists():
        raise UserError(f"{request.model / FOLDER} exists: remove it, to export the model again")
    if request.is_own_model:
        raise UserError(f"{request.model} has no config.json: only models of transformers can be exported to ONNX")
    for package in PACKAGES:
        require(package)
    return request


def export(request: Request) -> Figures:
    """Write the ONNX file, complete or not at all, and the figures of the check into the model card; return them.

    Raises:
        UserError: the model cannot be exported, the file does not compute the same, or the data cannot be used.
    """
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as onnxruntime
    with starting.freed_after():
        accelerator = starting.start(request.config)
        if accelerator.num_processes > 1:
            raise UserError(f"{accelerator.num_processes} processes: start python -m shared.export without a launcher")
        folder_lock.acquire(request.model, "OUTPUT_DIR")  # or a second export would remove what this one writes
        prediction, found = prediction_of(accelerator, request), {}

        def fill(folder: Path) -> None:
            found.update(write_checked(request, prediction, folder))

        write_folder(request.model / FOLDER, fill)
    data = f"FILE {request.file}" if request.file else "the validation data"
    text = (
        f"`{FOLDER}/{FILE}` is the {[*found['size, MB']][-1]} model of this table. All models computed "
        f"{count_of(len(prediction.data), 'sample')} of {data} in the same batches, with "
        f"{count_of(torch.get_num_threads(), 'thread')} of a CPU (torch {torch.__version__}, onnxruntime "
        f"{require('onnxruntime').__version__})."
    )
    section = "\n".join([HEADING, "", text, "", *table(found), ""])
    accelerator.print(section)
    add_to_card(request.model / CARD, section)
    return found


def write_checked(request: Request, prediction: Prediction, folder: Path) -> Figures:
    """Write the ONNX file into `folder`, and return the figures of the check.

    Raises:
        UserError: see `to_onnx` and `compare_computations`.
    """
    is_embedding = request.kind == "embeddings"
    models = {PYTORCH: Measured(prediction.model, is_embedding)}
    with torch.no_grad():
        micro_batch, batch = next(feed(prediction.batches, prediction.data, prediction.collate, torch.device("cpu")))
        prediction.compute(models[PYTORCH], micro_batch, batch)
    inputs = {name: tensor for name, tensor in models[PYTORCH].inputs.items() if name != "masked"}
    # Not the model of the prediction, in which shared/encoders has replaced functions that the exporter cannot express.
    plain = type(prediction.model).from_pretrained(request.model, dtype=torch.float32, local_files_only=True)
    shorten_last_layer(plain)
    program = to_onnx(plain, inputs, request.config.pooling if is_embedding else None)
    file = folder / FILE
    program.save(file)  # weights of more than 2 GB become a second file
    models[ONNX] = Measured(OnnxModel(file), is_embedding)
    sizes = {PYTORCH: size_of(request.model.glob("*.safetensors")), ONNX: size_of(folder.iterdir())}
    if request.config.int8:
        for written in folder.iterdir():
            written.unlink()
        write_int8(program, file)
        models[INT8] = Measured(OnnxModel(file), is_embedding)
        sizes[INT8] = size_of(folder.iterdir())
    return {"size, MB": sizes} | compare_computations(prediction, models)


def size_of(files: Any) -> float:
    """The size of files in MB."""
    return sum(file.stat().st_size for file in files) / 1e6


@torch.no_grad()
def compare_computations(prediction: Prediction, models: Mapping[str, Measured]) -> Figures:
    """Speed of each model, largest difference of its logits from those of PyTorch, and scores.

    Raises:
        UserError: the float32 file computes other logits than PyTorch.
    """
    shape = int(prediction.bounds[-1]), sum(prediction.widths)
    outputs = {name: np.empty(shape, np.float32) for name in models}
    difference, largest = dict.fromkeys(models, 0.0), 0.0
    stream = feed(prediction.batches, prediction.data, prediction.collate, torch.device("cpu"))
    for number, (micro_batch, batch) in enumerate(stream):
        for name, model in models.items():
            if not number:
                prediction.compute(model, micro_batch, {**batch})  # the first call of a model takes longer
                model.seconds = 0.0
            found = prediction.compute(model, micro_batch, {**batch})
            outputs[name][prediction.outputs_of(micro_batch.samples)] = found.numpy()
            gap = float((model.logits - models[PYTORCH].logits).abs().max())
            difference[name] = float(np.maximum(difference[name], gap))  # unlike max, it keeps NaN
        largest = max(largest, float(models[PYTORCH].logits.abs().max()))
    if not difference[ONNX] <= TOLERANCE * largest:
        raise UserError(
            f"onnxruntime computes other logits than PyTorch, which differ by up to {difference[ONNX]:.2g} where the "
            f"largest is {largest:.2g}: nothing was written; predict with PyTorch"
        )
    figures = {
        "samples per second": {name: len(prediction.data) / model.seconds for name, model in models.items()},
        f"largest difference of a logit (the largest logit is {largest:.3g})": difference,
    }
    scores = {name: prediction.score(*prediction.split(outputs[name])) if prediction.score else {} for name in models}
    return figures | {key: {name: scores[name][key] for name in models} for key in scores[PYTORCH]}


def table(figures: Figures) -> list[str]:
    """The lines of a table in Markdown."""
    columns = [*next(iter(figures.values()))]
    rows = [[name, *(f"{value:.4g}" for value in figures[name].values())] for name in figures]
    return [f"| {' | '.join(row)} |" for row in (["", *columns], ["---", *("---:" for _ in columns)], *rows)]


def add_to_card(card: Path, section: str) -> None:
    """Add a section to a model card, in place of that of an earlier export."""
    text = card.read_text() if card.is_file() else ""
    without = re.sub(rf"^{HEADING}\n.*?(?=^## |\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    replace_file(card, "\n\n".join(part for part in (without.rstrip(), section) if part))


if __name__ == "__main__":
    logging.disable(logging.ERROR)  # exporters print much about their own work; their errors are exceptions
    warnings.simplefilter("ignore")
    run_work(lambda: export(parse_export(sys.argv[1:])))
