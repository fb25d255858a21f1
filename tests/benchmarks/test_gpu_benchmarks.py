"""benchmarks/gpu.py at toy size on a CPU: each benchmark trains a recipe and returns the figures of its table."""

import importlib
import json
import math
import os
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from accelerate.state import AcceleratorState

from benchmarks import checkpoints, gpu
from benchmarks.harness import gpu_benchmarks, gpu_passes, run_gpu_benchmark
from benchmarks.harness.gpu_benchmarks import BENCHMARKS, LISTS_KERNELS, PARTS
from benchmarks.harness.kernels import kernels_per_step
from shared.config import options
from shared.processes.starting import set_backends

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="at toy size on a CPU only")
# One benchmark of each kind. The others differ in flags only, which a test below parses.
KINDS = ("bert_base_checkpoints", "modernbert_base_real", "resnet50", "vit_cache", "fine_tuning", "fine_tuning_trainer")
KINDS += ("embeddings", "bert_base_dense_head", "bare_loop_bert_base")
ALIKE = ("fine_tuning_packed", "tagging", "tagging_trainer", "bert_base_plain_adamw", "trainer_modernbert_base")
ALIKE += ("embeddings_sentence_transformers",)


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=pytest.mark.docs) for name in ALIKE)])
@pytest.mark.usefixtures("one_cpu_process_without_a_picture")
def test_a_benchmark_gives_its_figures(name, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", "")  # a benchmark sets it; the fixture restores it
    AcceleratorState._reset_state(reset_partial_state=True)  # its precision cannot be changed
    run_gpu_benchmark.run(name, tmp_path / name, toy=True)
    row = gpu.figures(BENCHMARKS[name], tmp_path / name)
    assert row["rate"] > 0
    assert row["lines"] == 3
    assert row["samples"] > 0
    if BENCHMARKS[name].part == "peers":
        return
    assert row["peak_memory_bytes"] > 0
    if name == "bert_base_checkpoints":
        assert row["checkpoint_stall"] > 0
        assert row["checkpoint_bytes"] > 1e5
    assert math.isfinite(row["host_waits_per_step"])
    if name == "resnet50":
        assert row["host_waits_per_step"] == 0
    assert ("kernels" in row) == (BENCHMARKS[name].part in LISTS_KERNELS)


@pytest.mark.docs  # a benchmark of `make gpu`
def test_a_save_that_is_due_when_the_last_one_is_done_is_measured_beside_a_copy(tmp_path, monkeypatch):
    AcceleratorState._reset_state(reset_partial_state=True)
    flags = ["--beside_copy", "--rounds", "1", "--output_dir", str(tmp_path / "saves")]
    monkeypatch.setattr(sys, "argv", ["benchmarks/checkpoints.py", *flags])
    checkpoints.main()
    row = gpu.figures(BENCHMARKS["saves"], tmp_path / "saves") | {"benchmark": "saves"}
    assert row["save_bytes"] > 5e7
    assert 0 < row["save_stall_ms"] < row["save_on_disk_ms"]
    assert math.isfinite(row["save_extra_ms"] + row["copy_extra_ms"])


def test_the_pages_have_the_tables_made_from_the_results():
    for page, make in gpu.PAGES.items():
        for file in gpu.RESULTS.glob("*.json"):
            assert make(json.loads(file.read_text())) in page.read_text(), "run python benchmarks/gpu.py --table"


def test_kernels_of_a_trace_are_summed_by_name_and_given_per_step(tmp_path):
    kernel = {"cat": "kernel", "name": "product"}
    events = [kernel | {"ts": 0, "dur": 3000}, kernel | {"ts": 9000, "dur": 1000}, {"name": "an operator", "dur": 1}]
    events.append({"cat": "gpu_memcpy", "name": "copy", "ts": 5000, "dur": 500})
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    found = kernels_per_step(tmp_path / "trace.json", 2)
    assert found["kernels"] == [
        {"name": "product", "ms": 2.0, "count": 1.0},
        {"name": "copy", "ms": 0.25, "count": 0.5},
    ]
    assert (found["busy_ms"], found["span_ms"]) == (2.25, 5.0)


# Python runs this at its start: it makes imports of `evaluate` and `datasets` fail, and records the command line.
HIDE = """
import pathlib, sys
sys.modules["evaluate"] = sys.modules["datasets"] = None
with pathlib.Path(__file__).with_name("started").open("a") as file:
    file.write(" ".join(sys.orig_argv) + "\\n")
"""


@pytest.mark.docs
def test_each_part_runs_where_packages_come_from_pythonpath_without_evaluate_and_datasets(tmp_path):
    python, needed = tmp_path / "bare/bin/python", tmp_path / "needed"
    runs.succeed([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"])
    needed.mkdir()
    (needed / "sitecustomize.py").write_text(HIDE)
    packages = [folder for folder in sys.path if folder.endswith("-packages")]
    environment = {"PYTHONPATH": os.pathsep.join([str(needed), *packages]), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    assert runs.run([python, "-c", "import torch"]).returncode != 0, "packages must come from PYTHONPATH only"
    few = "fine_tuning resnet50_eager bert_base_passes resnet50_plain_sgd"
    few += " bare_loop_bert_base predictions"
    make = ["make", "--no-print-directory", "gpu", "BIN=none", f"PYTHON={python}"]
    runs.succeed([*make, f"GPU_FLAGS=--output_dir {tmp_path} --benchmarks {few}"], timeout=500, **environment)
    started = (needed / "started").read_text()
    assert "run_gpu_benchmark.py" in started
    assert "-m pytest" in started
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert [entry["part"] for entry in found] == [*PARTS]
    distributed, tests, *others = [row for entry in found for row in entry["rows"]]
    assert [row["benchmark"] for row in others] == few.split()
    assert not [row for row in (distributed, tests, *others) if "problem" in row]
    assert distributed["failed"] == tests["failed"] == []
    assert len(others[2]["passes"]) == len(gpu_passes.TOY) > 2


@pytest.mark.parametrize(
    ("kind", "expected", "length", "masked", "sizes"),
    [
        ("bert", 0.554e9, 512, 0.15, (768, 12, 3072, 30522)),
        ("modernbert", 0.804e9, 1024, 0.3, (768, 22, 1152, 50368)),
    ],
)
def test_operations_per_token_are_right_for_the_published_sizes(kind, expected, length, masked, sizes):
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    config = SimpleNamespace(max_length=length, model_type=kind, model_name_or_path=None)
    vars(config).update(zip(names, sizes, strict=True))
    lengths = np.full(10, length)
    train = type("Data", (SimpleNamespace,), {"__len__": lambda _: 10})(lengths=lengths, masked=lengths * masked)
    assert run_gpu_benchmark.facts(kind, config, train, toy=False)["operations"] == pytest.approx(expected, rel=2e-3)


def test_a_run_leaves_the_attention_of_cudnn_on_where_a_variant_measures_it(monkeypatch):
    recipe = SimpleNamespace(main=lambda _: set_backends(False) or torch.backends.cuda.cudnn_sdp_enabled())
    run_gpu_benchmark.CHANGES["cudnn_attention"](monkeypatch.setattr, recipe)
    assert recipe.main(None)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_recipes_accept_the_flags_and_the_change_of_every_benchmark_at_full_size(name, tmp_path, monkeypatch):
    benchmark = BENCHMARKS[name]
    if benchmark.recipe == "passes" or benchmark.recipe in gpu_benchmarks.SCRIPTS:
        return
    recipe = importlib.import_module(f"recipes.{run_gpu_benchmark.recipe_of(benchmark)}")
    config = options.parse(recipe.Config, run_gpu_benchmark.command_line(benchmark, tmp_path, toy=False))
    assert config.max_train_steps == benchmark.steps
    assert ("bf16" in (config.mixed_precision, config.activation_dtype)) == (name != "bert_base_full_precision")
    if benchmark.change:
        run_gpu_benchmark.CHANGES[benchmark.change](monkeypatch.setattr, recipe)
    assert benchmark.warmup % gpu_benchmarks.LOGGING_STEPS == 0 < benchmark.steps - benchmark.warmup


def test_a_benchmark_that_fails_or_takes_too_long_is_a_row_with_its_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    row = gpu.race("resnet50", tmp_path / "cut", seconds=0.3)
    assert (row["problem"], row["lines"]) == ("cut off after 0 s", 0)
    monkeypatch.setattr(gpu, "HARNESS", tmp_path)
    (tmp_path / "run_gpu_benchmark.py").write_text("1 / 0\n")
    monkeypatch.setattr(gpu, "ceilings", lambda: {"product": 1.0})
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", "text"])
    file = tmp_path / "results/toy.json"
    assert not gpu.run_part("text", ["bert_base", "bert_large"], 60, file)
    (entry,) = json.loads(file.read_text())
    assert [row["problem"] for row in entry["rows"]] == ["ZeroDivisionError: division by zero"] * 2
    assert "`bert_base` (ZeroDivisionError: division by zero, minimum" in gpu.tables([entry])
    gpu.run_part("text", [], 60, file)
    assert len(json.loads(file.read_text())) == 1, "an entry without a row is not written"
