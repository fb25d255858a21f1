"""Measure how many texts per second `python -m shared.predict` predicts, beside transformers' `pipeline`.

    python benchmarks/predictions.py --output_dir out/predictions

A BERT with random weights predicts texts of mixed lengths, of up to 512 tokens, on one process. The texts are the
paragraphs of the embedded training docstrings or, with `--kind docstrings`, whole docstrings, which are five times as
long. They have a random order, and are repeated until there are --texts of them. The contestants take turns. The
pipeline is loaded already. The time of `shared.predict` includes loading the model, reading the file and writing the
predictions, but not the imports. Its `rate_without_load` leaves out `load_seconds`, in which it loads the tokenizer and
the model.

On a CPU, the BERT has 4 layers x 256, and all contestants predict the same texts. The pipeline has a batch size of 1,
8, 32 or 64. The rates are texts per second of wall-clock time on all cores. With one thread (`--threads 1`) they are
texts per second of CPU time, which other programs on the machine change less. --hidden_size and --num_hidden_layers
change the model. With --onnx, `shared.predict --runtime onnx` is a contestant as well, with files that `shared.export`
wrote in float32 and in int8.

On a GPU, the BERT has the layers of BERT-base, and the rates are texts per second of wall-clock time. `shared.predict`
predicts all texts. A pipeline predicts the first --pipeline_texts of them. It has a batch size of 1, 16, 64 or 256, and
tokenizes in the main process or in 4 loader workers. Before the first round, each contestant predicts a few texts that
are not measured.

All contestants have the same precision. With --mixed_precision bf16, `shared.predict` uses autocast, and the pipeline
has weights in bf16. With --mixed_precision no, it is float32, on a GPU with matrix products in TF32, as
`shared.predict` always has it; by default, a pipeline does not use TF32.

Writes predictions.json and predictions.md into the output folder.
"""

import argparse
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from benchmarks.harness import encoder_and_texts, rounds

CPU = {"texts": 4000, "batch_sizes": [1, 8, 32, 64], "pipeline_workers": [0], "max_tokens_per_micro_batch": 4096}
GPU = {"texts": 40_000, "batch_sizes": [1, 16, 64, 256], "pipeline_workers": [0, 4]}
GPU |= {"pipeline_texts": 4000, "max_tokens_per_micro_batch": 65_536}
BERT_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
BY_ONNX = {"ours, ONNX": [], "ours, ONNX int8": ["--int8"]}  # contestants with the flags of their export
WARM_UP, WARM_UP_TEXTS = -1, 256  # the number of the round that is not measured


def make_parser(on_gpu: bool) -> argparse.ArgumentParser:
    """The parser; some defaults depend on the device."""
    parser = rounds.parser(__doc__ or "", "out/predictions")
    parser.add_argument("--kind", choices=("paragraphs", "docstrings"), default="paragraphs", help="the texts")
    parser.add_argument("--texts", type=int, help="texts to predict; default: 4,000, on a GPU 40,000")
    parser.add_argument("--pipeline_texts", type=int, help="texts for a pipeline; default: all, on a GPU 4,000")
    parser.add_argument("--batch_sizes", type=int, nargs="+", help="batch sizes of the pipelines")
    parser.add_argument("--pipeline_workers", type=int, nargs="+", help="loader workers of the pipelines")
    parser.add_argument("--hidden_size", type=int, help="of the BERT, with heads of 64; default: 256, on a GPU 768")
    parser.add_argument("--num_hidden_layers", type=int, help="of the BERT; default: 4, on a GPU 12")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help="of a CPU; default: one for each core")
    parser.add_argument("--onnx", action="store_true", help="also predict by onnxruntime, in float32 and int8")
    parser.add_argument("--mixed_precision", choices=("no", "bf16"), default="no", help="precision of all contestants")
    parser.add_argument(
        "--max_tokens_per_micro_batch", type=int, help="of shared.predict; default: 4,096, on a GPU 65,536"
    )
    parser.set_defaults(**GPU if on_gpu else CPU)
    return parser


def main() -> None:
    import torch

    on_gpu = torch.cuda.is_available()
    parser = make_parser(on_gpu)
    arguments = parser.parse_args()
    if arguments.onnx and (on_gpu or arguments.mixed_precision != "no"):
        parser.error("--onnx compares on a CPU, in float32")
    os.environ["TQDM_DISABLE"] = "1"
    if on_gpu:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as shared.predict does
    else:
        os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(arguments.threads)}
        torch.set_num_threads(arguments.threads)  # torch has been imported, and no longer reads OMP_NUM_THREADS
    pipelines = {
        f"pipeline, {size}" + (f", {workers} workers" if workers else ""): (size, workers)
        for size, workers in itertools.product(arguments.batch_sizes, arguments.pipeline_workers)
    }
    by_onnx = [*BY_ONNX] if arguments.onnx else []
    with tempfile.TemporaryDirectory() as folder:
        run = contestants(Path(folder), arguments, pipelines, on_gpu)
        for name in ("ours", *pipelines) if on_gpu else ():
            run(name, WARM_UP)
        rows = rounds.take_turns(["ours", *by_onnx, *pipelines], arguments.rounds, run)
    compared = {f"ours / {name}": rounds.compare(rows, "rate", "ours", name) for name in pipelines}
    compared["ours / the fastest pipeline"] = beside_the_fastest(rows, "rate")
    compared["ours without its load / the fastest pipeline"] = beside_the_fastest(rows, "rate_without_load")
    for name in by_onnx:
        compared |= {f"{name} / {other}": rounds.compare(rows, "rate", name, other) for other in ("ours", *pipelines)}
    gpu, cores = (torch.cuda.get_device_name(), len(os.sched_getaffinity(0))) if on_gpu else ("", arguments.threads)
    rounds.save(arguments, "predictions", cores, rows, compared, gpu=gpu)


def contestants(
    folder: Path, arguments: argparse.Namespace, pipelines: dict[str, tuple[int, int]], on_gpu: bool
) -> Callable[[str, int], rounds.Row]:
    """Write the model and the texts; a function that lets a contestant predict the texts and returns its figures.

    Args:
        folder: where to.
        arguments: those of the command line.
        pipelines: batch size and number of loader workers of each contestant except "ours".
        on_gpu: whether to compute on a GPU, or on a CPU.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoTokenizer, pipeline

    from shared import predict

    sizes = sizes_of(arguments, on_gpu)
    made = encoder_and_texts.prepare(folder, sizes=sizes)
    encoder, docstrings = str(made["model_name_or_path"]), pq.read_table(made["train_file"])["text"].to_pylist()
    texts = texts_of(docstrings, arguments.kind, arguments.texts)
    cut = {"truncation": True, "max_length": encoder_and_texts.MAX_LENGTH}
    lengths = np.array(list(map(len, AutoTokenizer.from_pretrained(encoder)(texts, **cut)["input_ids"])))
    dtype = torch.bfloat16 if arguments.mixed_precision == "bf16" else torch.float32
    device = "cuda:0" if on_gpu else "cpu"
    classify = pipeline("text-classification", model=encoder, top_k=None, dtype=dtype, device=device)
    by_cpu_time = not on_gpu and arguments.threads == 1
    clock = time.process_time if by_cpu_time else time.perf_counter
    flags = ["--max_length", encoder_and_texts.MAX_LENGTH]
    flags += ["--max_tokens_per_micro_batch", arguments.max_tokens_per_micro_batch]
    models = {"ours": encoder} | (exported(folder, encoder, texts) if arguments.onnx else {})

    def run(name: str, round_: int) -> rounds.Row:
        ours = name in models
        limit = None if ours else arguments.pipeline_texts
        chosen = texts[: WARM_UP_TEXTS if round_ == WARM_UP else limit]
        file, cache = folder / "texts.parquet", folder / "cache"
        pq.write_table(pa.table({"text": chosen}), file)
        os.environ["ACCELERATE_RECIPES_CACHE"] = str(cache)  # without the tokens of an earlier round
        if not by_cpu_time:  # what each sets by itself, if the variable is not set
            os.environ["TOKENIZERS_PARALLELISM"] = "true" if ours else "false"
        size, workers = pipelines.get(name, (0, 0))
        with load_times(clock) as loads:
            started, started_cpu = time.perf_counter(), time.process_time()
            if ours:
                words = [models[name], file, "--predictions_file", folder / f"{name}_{round_}.parquet", *flags]
                by_onnx = name in BY_ONNX
                words += ["--runtime", "onnx"] if by_onnx else ["--mixed_precision", arguments.mixed_precision]
                predict.predict(predict.parse_request([str(word) for word in words]))
            else:
                classify(chosen, batch_size=size, num_workers=workers, **cut)
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        shutil.rmtree(cache, ignore_errors=True)
        taken = cpu_seconds if by_cpu_time else seconds
        row = {"seconds": seconds, "cpu_seconds": cpu_seconds, "texts": len(chosen), "load_seconds": sum(loads)}
        row |= {"tokens_per_text": lengths[: len(chosen)].mean()}
        row |= {"rate": len(chosen) / taken, "rate_without_load": len(chosen) / (taken - sum(loads))}
        return row if ours else row | {"batch_size": size, "workers": workers}

    return run


def exported(folder: Path, model: str, texts: list[str]) -> dict[str, Path]:
    """Copies of the model with an ONNX file in float32 and in int8, by contestant; a few of the texts check them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from shared import export

    pq.write_table(pa.table({"text": texts[:64]}), folder / "checked.parquet")
    copies = {}
    for name, flags in BY_ONNX.items():
        copies[name] = shutil.copytree(model, folder / name.replace(", ", "_").replace(" ", "_"))
        words = [copies[name], folder / "checked.parquet", "--max_length", encoder_and_texts.MAX_LENGTH, *flags]
        export.export(export.parse_export([str(word) for word in words]))
    return copies


def texts_of(docstrings: list[str], kind: str, count: int) -> list[str]:
    """`count` docstrings or paragraphs of docstrings, in a random order, which is repeated if they are too few."""
    texts = docstrings
    if kind == "paragraphs":
        texts = [text for docstring in docstrings for text in re.split(r"\n\s*\n", docstring) if text.strip()]
    return [texts[i] for i in np.resize(np.random.default_rng(0).permutation(len(texts)), count)]


def sizes_of(arguments: argparse.Namespace, on_gpu: bool) -> dict[str, int]:
    """The sizes of the BERT, as fields of BertConfig."""
    sizes = BERT_BASE if on_gpu else encoder_and_texts.SIZES
    if width := arguments.hidden_size:
        heads = max(1, width // 64)
        sizes = sizes | {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 4 * width}
    return sizes | ({"num_hidden_layers": arguments.num_hidden_layers} if arguments.num_hidden_layers else {})


@contextmanager
def load_times(clock: Callable[[], float]) -> Iterator[list[float]]:
    """A list that gets the seconds of each load of a tokenizer or a model by `shared.predict`."""
    from shared.predictions import labels

    seconds: list[float] = []

    def timed(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_and_note(*given: Any) -> Any:
            started = clock()
            found = load(*given)
            seconds.append(clock() - started)
            return found

        return load_and_note

    loads = {name: timed(getattr(labels, name)) for name in ("load_tokenizer", "build_model")}
    with mock.patch.multiple(labels, **loads):
        yield seconds


def beside_the_fastest(rows: list[rounds.Row], figure: str) -> dict[str, Any]:
    """`figure` of ours divided by the rate of the fastest pipeline in each round, as a `rounds.summary`."""
    ours = {row["round"]: row[figure] for row in rows if row["contestant"] == "ours"}
    fastest = {
        round_: max(row["rate"] for row in rows if row["round"] == round_ and row["contestant"].startswith("pipeline"))
        for round_ in ours
    }
    return rounds.summary([ours[round_] / fastest[round_] for round_ in ours])


if __name__ == "__main__":
    main()
