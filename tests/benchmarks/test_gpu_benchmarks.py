"""benchmarks/gpu.py at toy size on a CPU: each benchmark trains a recipe and returns the figures of its table."""

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from accelerate.state import AcceleratorState

sys.path.insert(0, str(runs.ROOT))

from benchmarks import gpu
from benchmarks.harness import gpu_benchmarks, run_gpu_benchmark
from benchmarks.harness.gpu_benchmarks import BENCHMARKS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="at toy size on a CPU only")
# One of each kind; the others differ in flags, which the parser checks below.
KINDS = ("bert_base_checkpoints", "modernbert_base_real", "resnet50", "vit_cache", "fine_tuning", "fine_tuning_trainer")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The row of each kind of benchmark, all trained in this process."""
    folder = tmp_path_factory.mktemp("benchmarks")
    found = {}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}.items():
            environment.setenv(name, value)
        environment.setenv("ACCELERATE_RECIPES_CACHE", "")  # a benchmark sets it; the context restores it
        for name in KINDS:
            AcceleratorState._reset_state(reset_partial_state=True)  # one of another precision cannot be changed
            run_gpu_benchmark.run(name, folder / name, toy=True)
            found[name] = gpu.figures(BENCHMARKS[name], folder / name) | {"benchmark": name}
    return found


@pytest.mark.parametrize("name", KINDS)
def test_a_benchmark_gives_its_figures(rows, name):
    row = rows[name]
    assert row["rate"] > 0
    assert row["lines"] == 3
    assert row["samples"] > 0
    assert row["peak_memory_bytes"] > 0 or name == "fine_tuning_trainer"
    if name != "fine_tuning_trainer":
        assert math.isfinite(row["host_waits_per_step"])
    if name == "resnet50":
        assert row["host_waits_per_step"] == 0


def test_the_benchmark_with_checkpoints_gives_stall_and_size(rows):
    row = rows["bert_base_checkpoints"]
    assert row["checkpoint_stall"] > 0
    assert row["checkpoint_bytes"] > 1e5


def test_the_table_has_a_line_for_each_benchmark_and_marks_the_minimum_that_it_reaches(rows):
    copies = {"device": 3e12, "to_host": 5e10, "to_device": 5e10}
    report = {"machine": {"device": "H100", "versions": {"torch": "2"}, "date": "2026-01-01T", "command": "make gpu"}}
    report |= {"ceilings": {"product": 8e14} | copies, "rows": [dict(row) for row in rows.values()]}
    resnet = next(row for row in report["rows"] if row["benchmark"] == "resnet50")
    resnet |= {"rate": 4500.0, "operations": 24.5e9}
    gpu.compare(report)
    assert resnet["mfu"] == pytest.approx(4500 * 24.5e9 / 989.4e12)
    assert resnet["share_of_product"] == pytest.approx(4500 * 24.5e9 / 8e14)
    (pair,) = [pair for pair in report["ratios"] if pair["benchmarks"] == ["fine_tuning", "fine_tuning_trainer"]]
    assert pair["ratio"] == rows["fine_tuning"]["rate"] / rows["fine_tuning_trainer"]["rate"]
    text = gpu.table(report)
    assert "| resnet50 | on the device | 4,500 images | 4,000 ✓ | 5,600 ✗ | 11.1% |" in text
    assert all(f"| {name} |" in text for name in KINDS)
    assert "A call that saves" in text


def test_operations_are_those_of_the_published_sizes():
    """BERT-base at 512 with 15 % masked is 0.588 GFLOP per token, ModernBERT-base at 1,024 with 30 % 0.825."""
    hidden = {"bert": 0.15, "modernbert": 0.3}
    for kind, expected, length, sizes in (
        ("bert", 0.588e9, 512, (768, 12, 3072, 30522)),
        ("modernbert", 0.825e9, 1024, (768, 22, 1152, 50368)),
    ):
        names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
        config = SimpleNamespace(max_length=length, model_type=kind, model_name_or_path=None)
        vars(config).update(zip(names, sizes, strict=True))
        lengths = np.full(10, length)
        train = SimpleNamespace(lengths=lengths, masked=lengths * hidden[kind])
        found = run_gpu_benchmark.facts(
            kind, config, type("Data", (), {**vars(train), "__len__": lambda _: 10})(), toy=False
        )
        assert found["operations"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_flags_of_every_benchmark_are_known_at_full_size_too(name, tmp_path):
    import importlib

    from shared.config import options

    benchmark = BENCHMARKS[name]
    if benchmark.recipe == "trainer":
        return
    recipe = importlib.import_module(f"recipes.{benchmark.recipe}")
    config = options.parse(recipe.Config, run_gpu_benchmark.command_line(benchmark, tmp_path, toy=False))
    assert (config.max_train_steps, config.mixed_precision) == (benchmark.steps, "bf16")
    assert benchmark.warmup % gpu_benchmarks.LOGGING_STEPS == 0 < benchmark.steps - benchmark.warmup


def test_a_benchmark_that_fails_or_takes_too_long_is_a_row_with_its_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    row = gpu.race("resnet50", tmp_path / "cut", seconds=0.3)
    assert (row["problem"], row["lines"]) == ("cut off", 0)
    (tmp_path / "failed").write_text("a file where a folder should be")
    row = gpu.race("resnet50", tmp_path / "failed", seconds=60)
    assert "FileExistsError" in row["problem"]
    report = {"machine": {"device": "x", "versions": {}, "date": "", "command": ""}, "ceilings": {"product": 1.0}}
    report |= {"rows": [row], "ratios": []}
    assert "FileExistsError" in gpu.table(report)
    assert json.dumps(report)
