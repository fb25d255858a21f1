"""Predict a file with a trained model: a file with the columns of the input, predictions and probabilities.

    python -m shared.predict OUTPUT_DIR FILE [FLAGS]
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml -m shared.predict OUTPUT_DIR FILE [FLAGS]

OUTPUT_DIR is the folder of a finished run, whose recipe predicts, or a folder that save_pretrained wrote. FILE is a
file of any kind that the recipe reads; for images also a folder. Without FILE, the run's own validation data are
predicted, so that the printed scores are those of the run's last evaluation.

The file is complete or absent, and the same on any number of processes. Start an interrupted command again to resume.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

from shared.checkpoints.progress import Progress
from shared.errors import UserError, count_of
from shared.options.text_options import TOKENS
from shared.predictions import parts
from shared.predictions.embeddings import predict_embeddings
from shared.predictions.images import predict_images
from shared.predictions.labels import predict_texts
from shared.predictions.onnx import FILE, FOLDER, OnnxModel
from shared.predictions.prediction import Prediction, predict_table
from shared.predictions.request import SAMPLES, Request, parse_request
from shared.predictions.tags import predict_tags
from shared.processes import starting
from shared.run.command import ran_out
from shared.run.recipes import run_work
from shared.run.resume import refuse_changed_data

Predict = Callable[[Any, Request], Prediction]  # from an Accelerator and a request
KINDS: dict[str, Predict] = {
    "texts": predict_texts,
    "images": predict_images,
    "tags": predict_tags,
    "embeddings": predict_embeddings,
    "table": predict_table,
}


def predict(request: Request, how: Predict | None = None) -> dict[str, float]:
    """Predict and return the scores by name; {} without labels. Every process calls this. `how`: see `prediction_of`.

    Raises:
        UserError: the input, the model or the launch cannot be used.
    """
    if request.config.runtime:
        request = request.as_onnx("pooling")
    with starting.freed_after():
        accelerator = starting.start(request.config)
        config = dataclasses.replace(request.config, mixed_precision=accelerator.mixed_precision)
        request = dataclasses.replace(request, config=config)
        try:
            prediction = prediction_of(accelerator, request, how)
            if config.runtime:
                prediction.model = OnnxModel(request.model / FOLDER / FILE)
                prediction.notes["runtime"] = f"onnxruntime, {prediction.model.file}"
            record = parts.predict_in_parts(accelerator, request, prediction)
        except Exception as error:
            if not ran_out(error):
                raise
            limits = zip((TOKENS, SAMPLES), request.limits, strict=True)
            flags = " or ".join(f"--{name} {value}" for name, value in limits if value)
            raise UserError(f"process {os.environ.get('RANK', 0)} ran out of memory: lower {flags}") from error
    scores = {name: float(value) for name, value in record["scores"].items()}  # the record has NaN as a name
    shown = "".join(f"  {name} {value:.4g}" for name, value in scores.items())
    accelerator.print(f"{request.output}: {count_of(record['rows'], 'row')}{shown}")
    return scores


def prediction_of(accelerator: Any, request: Request, how: Predict | None = None) -> Prediction:
    """What is predicted, as `how` says or the kind of the request, with its data checked. Every process calls this.

    Raises:
        UserError: the input or the model cannot be used, or the data of the run have changed.
    """
    prediction = (how or KINDS[request.kind])(accelerator, request)
    refuse_changed_data(accelerator, Progress(), prediction.data)
    if request.file is None and request.digests_of_run[1:] not in ([], [prediction.data.digest()]):
        raise UserError(
            f"the validation data are no longer those of the run in {request.run}: restore them, or give a FILE"
        )
    return prediction


if __name__ == "__main__":
    run_work(lambda: predict(parse_request(sys.argv[1:])))
