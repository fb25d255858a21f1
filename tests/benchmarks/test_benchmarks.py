"""The benchmarks run and write their results; no test depends on a speed."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from torch.nn import functional as F

sys.path.insert(0, str(runs.ROOT))

from benchmarks import (
    embeddings_peers,
    image_peers,
    launch_to_first_step,
    loop_cost,
    masked_layer,
    mlm_head,
    mlm_peers,
    nlp_peers,
    packing,
    results_table,
    utilisation,
)
from benchmarks.harness import contestants, encoder_and_texts, launching, rounds
from recipes import embeddings, image_classification, mlm, nlp
from shared.config import options


@pytest.mark.docs  # its command is in docs/performance.md
def test_nlp_peers_writes_a_row_per_contestant_and_round_the_evaluation_and_a_table(tmp_path):
    flags = {"processes": 1, "rounds": 1, "steps": 4, "texts": 48, "global_batch_size": 4, "rows": 2}
    words = launching.flag_words(flags | {"evaluation_texts": 16, "contestants": "bare", "output_dir": tmp_path})
    runs.succeed([sys.executable, runs.ROOT / "benchmarks/nlp_peers.py", *words], OMP_NUM_THREADS="1")
    report = json.loads((tmp_path / "nlp_cpu.json").read_text())
    (row,) = report["rows"]
    assert (row["contestant"], row["round"]) == ("bare", 0)
    assert row["tokens_per_second"] == pytest.approx(row["samples_per_second"] * row["tokens_per_sample"])
    assert row["samples_per_second"] * row["seconds"] == pytest.approx(2 * 4)  # two updates, the first one left out
    assert 0 <= row["padding_share"] < 1
    assert row["peak_rss_mib"] > 100
    assert {"cpu", "cores", "versions", "date"} <= set(report["machine"])
    assert f"| {nlp_peers.LABELS['bare']} |" in (tmp_path / "nlp_cpu.md").read_text()
    (turn,) = report["evaluation"]["turns"]
    assert turn["of_trainer"] == pytest.approx(turn["ours"] / turn["trainer"])


def test_the_recipe_is_started_with_flags_that_it_knows():
    arguments = SimpleNamespace(
        global_batch_size=128, max_tokens_per_micro_batch=1024, steps=2, processes=2, mixed_precision="bf16"
    )
    prepared = {"encoder": "encoder", "files": {"train_file": "train.parquet", "nlp": "validation.parquet"}}
    script, *flags = nlp_peers.recipe_command(arguments, prepared, Path("out"), 3)
    assert Path(script).is_file()
    config = options.parse(nlp.Config, [str(flag) for flag in flags])
    assert (config.max_train_steps, config.logging_steps, config.checkpointing_steps, config.seed) == (3, 1, "no", 3)


def test_the_masked_recipe_is_started_with_flags_that_it_knows():
    flags = mlm_peers.recipe_flags(Path("folder"))
    config = options.parse(mlm.Config, launching.flag_words(flags))
    assert (config.train_file, config.max_length, config.mlm_probability) == (("folder/train.parquet",), 512, 0.3)


def test_the_embeddings_recipe_is_started_with_flags_that_it_knows():
    flags = embeddings_peers.recipe_flags(Path("folder"))
    config = options.parse(embeddings.Config, launching.flag_words(flags))
    assert (config.train_file, config.max_length, config.temperature) == (("folder/train.parquet",), 128, 0.05)


@pytest.mark.docs  # its command is in docs/images.md
def test_the_image_recipe_and_a_bare_loop_train_step_by_step(tmp_path):
    flags = {"processes": 1, "rounds": 1, "steps": 12, "global_batch_size": 32, "output_dir": tmp_path}
    script = [sys.executable, runs.ROOT / "benchmarks/image_peers.py"]
    runs.succeed([*script, *launching.flag_words(flags)], OMP_NUM_THREADS="1")
    report = json.loads((tmp_path / "images_cpu.json").read_text())
    each = [f"{name}, {benchmark}" for benchmark in image_peers.BENCHMARKS for name in ("ours", "bare")]
    assert [row["contestant"] for row in report["rows"]] == each
    assert all(row["images_per_second"] * row["update_ms"] == pytest.approx(32_000) for row in report["rows"])
    assert [*report["comparisons"]] == [f"speed of ours / bare, {benchmark}" for benchmark in image_peers.BENCHMARKS]


def test_the_image_recipe_is_compared_with_and_without_augmentation():
    for benchmark, area in (("plain", 1), ("augmented", 0.7)):
        flags = launching.flag_words(image_peers.recipe_flags(benchmark, 256, 2))
        config = options.parse(image_classification.Config, flags)
        assert (config.per_device_train_batch_size, config.min_crop_area) == (128, area)


def test_both_kinds_of_head_measure_the_same_loss(monkeypatch):
    monkeypatch.setattr(mlm_head, "ROWS", 2)
    dense, sparse = (mlm_head.measure(kind, 1) for kind in ("dense", "sparse"))
    assert sparse["loss"] == pytest.approx(dense["loss"], rel=1e-6)
    assert min(dense["seconds"], sparse["seconds"]) > 0


def test_all_ways_to_compute_the_loss_of_a_masked_language_model_measure_the_same_loss(monkeypatch):
    monkeypatch.setattr(mlm_head, "ROWS", 2)
    monkeypatch.setattr(mlm_head, "LARGE", {**mlm_head.LARGE, "vocab_size": 300, "hidden_size": 24})
    kinds = [kind for kind in mlm_head.KINDS["losses"] if kind != "linear_cross_entropy" or hasattr(F, kind)]
    rows = [{"kind": kind, "round": 0, **mlm_head.measure(kind, 1)} for kind in kinds]
    rows = [row | {"peak_mib": row["peak_mib"] or 1.0} for row in rows]  # this process may have had a higher peak
    for kind in kinds[1:]:
        assert mlm_head.compare(rows, kinds[0], kind)["loss_difference"] < 1e-6


@pytest.mark.docs  # its command is in docs/faster_runs.md
def test_packed_and_padded_texts_of_a_step_have_the_same_tokens_and_loss(tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    made = packing.passes_of_steps(tmp_path, (6,), texts=24, **sizes)
    assert len(made) == 4
    for precision, near in (("fp32", 1e-5), ("bf16", 0.02)):
        padded, packed = (made[f"{precision}, 6 texts, {way}"](1) for way in packing.WAYS)
        assert packed["loss"] == pytest.approx(padded["loss"], rel=near)
        tokens = [row["tokens_per_cpu_second"] * row["cpu_seconds"] for row in (padded, packed)]
        assert tokens[0] == pytest.approx(tokens[1])
        assert packed["padding_share"] == 0 < padded["padding_share"]


def test_a_last_layer_on_the_tokens_of_the_loss_is_measured_against_one_on_all_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(masked_layer, "LENGTHS", np.array([9, 7]))
    name, (kind, sizes, share) = next(iter(masked_layer.CASES.items()))
    small = sizes | {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 16}
    monkeypatch.setattr(masked_layer, "CASES", {name: (kind, small, share)})
    monkeypatch.setattr(sys, "argv", ["benchmarks/masked_layer.py", "--rounds", "1", "--output_dir", str(tmp_path)])
    threads = torch.get_num_threads()
    try:
        masked_layer.main()
    finally:
        torch.set_num_threads(threads)
    report = json.loads((tmp_path / "masked_layer.json").read_text())
    assert [*report["comparisons"]] == [f"{name}: all tokens / {name}: those of the loss"]
    assert min(row["cpu_ms"] for row in report["rows"]) > 0


def test_ratios_compare_the_same_round_and_give_the_extremes():
    rates = {"ours": [10.0, 20.0, 30.0], "bare": [5.0, 20.0, 10.0]}
    rows = [
        {"contestant": name, "round": i, "tokens_per_second": rate}
        for name in rates
        for i, rate in enumerate(rates[name])
    ]
    found = {"rounds": [2.0, 1.0, 3.0], "median": 2.0, "low": 1.0, "high": 3.0, "min": 1.0, "max": 3.0}
    assert nlp_peers.ratios(rows) == {"bare": found}


def test_a_few_typical_updates_have_the_mean_length_of_an_epoch_sorted_by_length():
    lengths = np.random.default_rng(0).integers(1, 500, 6400)
    order = np.argsort(-lengths).tolist()
    taken = contestants.typical_updates(order, lengths, size=64, steps=5, warmup=1, seed=0)
    assert len(taken) == 5 * 64
    assert len(set(taken[64:])) == 4 * 64
    assert lengths[taken[64:]].mean() == pytest.approx(lengths.mean(), rel=0.02)


def test_contestants_take_turns_to_begin_and_are_compared_within_a_round(capsys):
    order = []
    rows = rounds.take_turns(
        "ab", 3, lambda name, i: order.append(name) or {"seconds": (i + 1.0) * (1 + (name == "b"))}
    )
    assert order == list("abbaab")
    assert rounds.compare(rows, "seconds", "b", "a")["rounds"] == [2, 2, 2]
    assert rounds.compare(rows, "seconds", "b", "a", difference=True)["rounds"] == [1, 2, 3]
    assert "round 2 b" in capsys.readouterr().out


def test_the_interval_holds_the_median_and_narrows_with_more_rounds():
    random = np.random.default_rng(0)
    few, many = (rounds.summary(random.normal(10, 1, size)) for size in (5, 100))
    for found in (few, many):
        assert found["low"] <= found["median"] <= found["high"]
    assert many["high"] - many["low"] < few["high"] - few["low"]


@pytest.mark.parametrize("name", ["ours", *loop_cost.OTHERS])
def test_every_loop_is_measured_step_by_step(tmp_path, monkeypatch, name):
    if name == "fabric":
        pytest.importorskip("lightning_fabric")
    monkeypatch.setattr(nlp, "load_data", nlp.load_data)  # `ours` replaces them
    monkeypatch.setattr(nlp, "build_model", nlp.build_model)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(loop_cost, "WARMUP", 4)
    monkeypatch.setattr(loop_cost, "BLOCK", 2)
    found = loop_cost.measure(name, 12, tmp_path)
    assert 0 < found["tenth_us"] <= found["thread_us"]
    assert found["wall_us"] > 0


@pytest.mark.docs  # its command is in docs/performance.md
def test_the_recipe_and_a_bare_loop_train_the_same_weights_bit_by_bit(tmp_path):
    # Micro-batches have several rows, because those without padding, such as single rows, differ in rounding.
    flags = ["--rounds", 1, "--steps", 2, "--texts", 48, "--global_batch_size", 8]
    runs.succeed([sys.executable, runs.ROOT / "benchmarks/bare_loop_same_batches.py", *flags, "--output_dir", tmp_path])
    report = json.loads((tmp_path / "bare_loop_same_batches.json").read_text())
    assert [row["equal"] for row in report["rows"]] == [True, True]
    assert report["comparisons"]["speed of ours / bare"]["median"] > 0


@pytest.mark.docs  # its command is in docs/performance.md
def test_run_to_first_step_ends_a_run_of_the_recipe_after_its_first_step(texts, tmp_path):
    script = [launching.HARNESS / "run_to_first_step.py", tmp_path / "noted", runs.ROOT / "recipes/nlp.py"]
    runs.succeed([sys.executable, *script, *texts, *runs.TINY, "--output_dir", tmp_path / "run"], OMP_NUM_THREADS="1")
    assert float((tmp_path / "noted").read_text()) > 0
    assert (tmp_path / "run/config.yaml").exists()
    assert not (tmp_path / "run/metrics.jsonl").exists()  # it logs after the second


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """Replace launches: parse the recipe's flags, write the files of a run, and collect the configs."""
    configs = []

    def launch(processes, log, script, *words):
        words = [str(word) for word in words]
        if Path(script).name == "run_to_first_step.py":
            Path(words[0]).write_text("1e10")
            script, words = words[1], words[2:]
        if not str(script).endswith("recipes/nlp.py"):
            return 1.0
        config = options.parse(nlp.Config, words)
        configs.append(config)
        output = Path(config.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        figures = {
            "mfu": 0.5,
            "tokens_per_second": 100.0 * processes,
            "padding": 0.1,
            "communication": 0.0,
            "step_seconds": 2.0,
            "loss": 1.0,
        }
        lines = [json.dumps({"step": step + 1} | figures) for step in range(config.max_train_steps or 1)]
        (output / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return 1.0

    monkeypatch.setattr(launching, "launch", launch)
    files = {"train_file": "train.parquet", "nlp": "validation.parquet"}
    monkeypatch.setattr(encoder_and_texts, "prepare", lambda *_, **__: {"encoder": "encoder", "files": files})
    return configs


@pytest.mark.parametrize(
    ("benchmark", "name", "expected"),
    [
        (utilisation, "mfu, wide bf16", 0.5),
        (launch_to_first_step, "launch to first step, ours / trainer", 1.0),
    ],
)
def test_a_benchmark_starts_the_recipe_with_flags_that_it_knows(
    pretended, monkeypatch, tmp_path, benchmark, name, expected
):
    script = benchmark.__name__.removeprefix("benchmarks.")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--rounds", "2", "--output_dir", str(tmp_path)])
    monkeypatch.setattr(utilisation, "SIDES", (16, 32))
    benchmark.main()
    report = json.loads((tmp_path / f"{script}.json").read_text())
    assert report["comparisons"][name]["median"] == pytest.approx(expected, rel=0.01)
    assert pretended
    assert f"| {name} | " in (tmp_path / f"{script}.md").read_text()


def test_the_page_has_the_table_made_from_the_results():
    assert results_table.table() in results_table.PAGE.read_text()


def test_a_comparison_without_figures_reads_not_measured_and_gives_its_command(monkeypatch, tmp_path):
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    assert all("| not measured | " in results_table.row_of(comparison) for comparison in results_table.COMPARISONS)
    assert {comparison.command for comparison in results_table.COMPARISONS} == set(
        results_table.commands().splitlines()
    ) - {"```"}
    speed, equal = rounds.summary([0.997, 0.999]), rounds.summary([1.0, 1.0])
    report = {
        "machine": {"cpu": "Z80", "cores": 2, "cores_used": 1},
        "command": "python benchmarks/bare_loop_same_batches.py",
        "rows": [{"contestant": name, "step_seconds": 0.5} for name in ("ours", "bare")],
        "comparisons": {"speed of ours / bare": speed, "rounds with weights equal to the bit": equal},
    }
    (tmp_path / "bare_loop_same_batches.json").write_text(json.dumps(report))
    row = results_table.row_of(results_table.COMPARISONS[1])
    assert "| 0.998 (0.997 to 0.999), weights equal |" in row
    assert "| [Z80, 1 of 2 cores](../benchmarks/results/bare_loop_same_batches.json) |" in row
    assert "python benchmarks/bare_loop_same_batches.py" in results_table.commands().splitlines()
