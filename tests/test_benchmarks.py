"""The benchmarks run and leave what they promise; how fast anything is, is not tested here."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runs

sys.path.insert(0, str(runs.ROOT / "benchmarks"))

import contestants
import mlm_head
import mlm_peers
import monitor_cost
import peers

from recipes import mlm, nlp
from shared import options


def test_peers_leaves_a_row_per_contestant_and_round_and_a_table(tmp_path):
    flags = {"processes": 1, "rounds": 1, "steps": 4, "texts": 48, "global_batch_size": 4, "rows": 2}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    chosen = ["--lanes", "nlp", "--contestants", "bare", "--output_dir", str(tmp_path)]
    runs.succeed([sys.executable, runs.ROOT / "benchmarks/peers.py", *words, *chosen], OMP_NUM_THREADS="1")
    report = json.loads((tmp_path / "nlp_cpu.json").read_text())
    (row,) = report["rows"]
    assert (row["contestant"], row["round"]) == ("bare", 0)
    assert row["tokens_per_second"] == pytest.approx(row["samples_per_second"] * row["tokens_per_sample"])
    assert row["samples_per_second"] * row["seconds"] == pytest.approx(2 * 4)  # two updates, the first one left out
    assert 0 <= row["padding_share"] < 1
    assert row["peak_rss_mib"] > 100
    assert {"cpu", "cores", "versions", "date"} <= set(report["machine"])
    assert f"| {peers.LABELS['bare']} |" in (tmp_path / "nlp_cpu.md").read_text()


def test_the_recipe_is_started_with_flags_that_it_knows():
    arguments = SimpleNamespace(global_batch_size=128, max_tokens_per_micro_batch=1024, steps=2, processes=2)
    prepared = {"encoder": "encoder", "files": {"train_file": "train.parquet", "nlp": "validation.parquet"}}
    script, *flags = peers.recipe_command(arguments, prepared, Path("out"), 3)
    assert Path(script).is_file()
    config = options.parse(nlp.Config, [str(flag) for flag in flags])
    assert (config.max_train_steps, config.logging_steps, config.checkpointing_steps, config.seed) == (3, 1, "no", 3)


def test_the_masked_recipe_is_started_with_flags_that_it_knows():
    flags = mlm_peers.recipe_flags(Path("folder"))
    config = options.parse(mlm.Config, [str(word) for name, value in flags.items() for word in (f"--{name}", value)])
    assert (config.train_file, config.max_length, config.mlm_probability) == ("folder/train.parquet", 512, 0.3)


def test_both_kinds_of_head_measure_the_same_loss(monkeypatch):
    monkeypatch.setattr(mlm_head, "ROWS", 2)
    dense, sparse = (mlm_head.measure(kind, 1) for kind in ("dense", "sparse"))
    assert sparse["loss"] == pytest.approx(dense["loss"], rel=1e-6)
    assert min(dense["seconds"], sparse["seconds"]) > 0


def test_the_cost_of_the_monitor_is_measured(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = monitor_cost.measure(rounds=1, steps=2, micro_batches=2)
    assert min(found.values()) > 0


def test_ratios_compare_the_same_round_and_give_the_extremes():
    rates = {"ours": [10.0, 20.0, 30.0], "bare": [5.0, 20.0, 10.0]}
    rows = [
        {"contestant": name, "round": i, "tokens_per_second": rate}
        for name in rates
        for i, rate in enumerate(rates[name])
    ]
    assert peers.ratios(rows) == {"bare": {"rounds": [2.0, 1.0, 3.0], "median": 2.0, "min": 1.0, "max": 3.0}}


def test_a_few_typical_updates_have_the_mean_length_of_an_epoch_sorted_by_length():
    lengths = np.random.default_rng(0).integers(1, 500, 6400)
    order = np.argsort(-lengths).tolist()
    taken = contestants.typical_updates(order, lengths, size=64, steps=5, warmup=1, seed=0)
    assert len(taken) == 5 * 64
    assert len(set(taken[64:])) == 4 * 64
    assert lengths[taken[64:]].mean() == pytest.approx(lengths.mean(), rel=0.02)
