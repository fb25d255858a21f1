"""benchmarks/predictions.py at the toy size that gpu.py gives it without a GPU; no test depends on a speed."""

import json
import os
import sys
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import runs
import torch
from transformers import TextClassificationPipeline

from benchmarks import gpu, predictions
from benchmarks.harness import encoder_and_texts
from benchmarks.harness.gpu_benchmarks import BENCHMARKS, PREDICTIONS
from shared import predict
from shared.demo_data import texts as demo_texts

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="at toy size on a CPU only")
FEW = 10  # fewer than the toy size, so that texts are repeated


def run_script(flags, patch):
    """Run the script on few texts with a tiny model."""
    lines = [line for line in (runs.ROOT / "CONTRIBUTING.md").read_text().splitlines() if len(line.split()) > 4]
    table = pa.table({"text": lines[:FEW], "label": [str(i % 2) for i in range(FEW)]})
    patch.setattr(demo_texts, "load", lambda: (table, table))
    patch.setattr(encoder_and_texts, "SIZES", runs.SIZES)
    patch.setattr(sys, "argv", ["benchmarks/predictions.py", *flags, "--threads", "1"])
    before = torch.get_num_threads()
    with mock.patch.dict(os.environ, ACCELERATE_USE_CPU="true"):
        predictions.main()
    torch.set_num_threads(before)


def test_contestants_predict_in_turns_in_one_precision_and_are_compared(tmp_path, monkeypatch):
    called, predicted = [], []  # dtype and batch size of each call of the pipeline; rows and precision of each of ours
    call, predict_file = TextClassificationPipeline.__call__, predict.predict

    def call_and_note(pipeline, texts, **given):
        called.append((pipeline.model.dtype, given["batch_size"]))
        return call(pipeline, texts, **given)

    def predict_and_note(request):
        found = predict_file(request)
        predicted.append((pq.read_metadata(request.output).num_rows, request.config.mixed_precision))
        return found

    monkeypatch.setattr(TextClassificationPipeline, "__call__", call_and_note)
    monkeypatch.setattr(predict, "predict", predict_and_note)
    flags = [*gpu.script_flags(BENCHMARKS["predictions"]), "--rounds", "2", "--output_dir", str(tmp_path)]
    run_script(flags, monkeypatch)
    report = json.loads((tmp_path / "predictions.json").read_text())
    texts = {"ours": 12, "pipeline, 1": 4, "pipeline, 4": 4}
    rounds = {(row["round"], row["contestant"], row["texts"]) for row in report["rows"]}
    assert rounds == {(round_, *each) for round_ in range(2) for each in texts.items()}
    for row in report["rows"]:
        assert row["rate"] == pytest.approx(row["texts"] / row["cpu_seconds"])
        without_load = row["cpu_seconds"] - row["load_seconds"]
        assert row["rate_without_load"] == pytest.approx(row["texts"] / without_load)
    assert sorted(called, key=lambda each: each[1]) == [(torch.bfloat16, size) for size in (1, 1, 4, 4)]
    assert predicted == [(12, "bf16")] * 2
    fastest, without_load = "ours / the fastest pipeline", "ours without its load / the fastest pipeline"
    assert [*report["comparisons"]] == ["ours / pipeline, 1", "ours / pipeline, 4", fastest, without_load]
    assert f"| {fastest} | " in (tmp_path / "predictions.md").read_text()


@pytest.mark.parametrize("name", PREDICTIONS)
def test_the_script_accepts_the_flags_that_gpu_py_gives_it_on_a_gpu(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    arguments = predictions.make_parser(on_gpu=True).parse_args(gpu.script_flags(BENCHMARKS[name]))
    assert arguments.batch_sizes == [16, 64, 256]
    assert arguments.pipeline_workers == [0, 4]
    assert arguments.pipeline_texts < arguments.texts == 20_000
    assert arguments.max_tokens_per_micro_batch == 65_536
