"""The benchmarks run and write their results; no test depends on a speed."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import runs

from benchmarks import checkpoints, loop_cost, peers, preparing, restart, results_table, utilisation
from benchmarks.harness import encoder_and_texts, launching, rounds
from recipes import nlp
from shared.config import options


def test_contestants_take_turns_to_begin_and_are_compared_within_a_round(capsys):
    order = []
    rows = rounds.take_turns(
        "ab", 3, lambda name, i: order.append(name) or {"seconds": (i + 1.0) * (1 + (name == "b"))}
    )
    assert order == list("abbaab")
    assert rounds.compare(rows, "seconds", "b", "a")["rounds"] == [2, 2, 2]
    assert rounds.compare(rows, "seconds", "b", "a", difference=True)["rounds"] == [1, 2, 3]
    assert "round 2 b" in capsys.readouterr().out


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
    assert min(found["thread_us"], found["wall_us"]) > 0


def checks_of_checkpoints(report):
    (found,) = report["sizes"]
    assert [row["contestant"] for row in found["writing"]["rows"]] == [*checkpoints.WRITERS]
    assert len(found["reading"]["rows"]) == 2 * len(checkpoints.READERS)


def checks_of_preparing(report):
    assert len(report["rows"]) == len(report["comparisons"]) == 2 * len(preparing.KINDS)
    assert all(min(row["seconds"], row["cpu_seconds"], row["own_mib"]) > 0 for row in report["rows"])


def checks_of_restart(report):
    (row,) = report["rows"]
    assert min(row[phase] for phase in restart.PHASES) > 0
    assert row["steps"] >= restart.KILLED_AT - restart.SAVED_EVERY


def checks_of_the_bare_loop(report):
    assert [row["equal"] for row in report["rows"]] == [True, True]


def checks_of_peers(report):
    assert [row["contestant"] for row in report["rows"]] == ["recipe", "accelerate"]
    for row in report["rows"]:
        assert min(row["processor_seconds"], row["wall_seconds"], row["rate"], row["score"]) > 0


def checks_of_scaling(report):
    (row,) = report
    assert (row["processes"], row["variant"], row["repeats"]) == (2, "bf16_gradients", 1)
    assert row["samples_per_second"] * row["step_seconds"] == pytest.approx(8, rel=1e-6)


TINY = "--hidden_size 32 --num_attention_heads 2 --num_hidden_layers 1 --vocab_size 500 --max_length 32"
SMALL = {  # benchmark: (flags, what its report must have)
    "checkpoints": ("--gigabytes 0.06 --rounds 1", checks_of_checkpoints),
    "preparing": ("--rounds 1 --megabytes 1 --rows 200 --photos 20", checks_of_preparing),
    "restart": ("--processes 2 --rounds 1", checks_of_restart),
    # Micro-batches have several rows, because those without padding, such as single rows, differ in rounding.
    "bare_loop_same_batches": ("--rounds 1 --steps 2 --texts 48 --global_batch_size 8", checks_of_the_bare_loop),
    "peers": (
        "--work tagging --rounds 1 --samples 128 --validation_samples 32 --contestants recipe accelerate",
        checks_of_peers,
    ),
    "scaling": (
        f"--processes 2 --steps 3 --repeats 1 --global_batch_size 8 --variants bf16_gradients --flags '{TINY}'",
        checks_of_scaling,
    ),
}


@pytest.mark.docs  # the pages have the commands
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_of_a_small_size_writes_its_report(name, tmp_path):
    flags, check = SMALL[name]
    script = runs.ROOT / f"benchmarks/{name}.py"
    runs.succeed([sys.executable, script, *shlex.split(flags), "--output_dir", tmp_path])
    (report,) = tmp_path.glob("*.json")
    check(json.loads(report.read_text()))


def test_the_page_has_the_figures_of_the_committed_result_of_restarts():
    medians = json.loads((runs.ROOT / "benchmarks/results/restart.json").read_text())["median_seconds"]
    page = (runs.ROOT / "docs/elasticity.md").read_text()
    rows = re.findall(r"^\| (\d) \|" + r" ([\d.]+) \|" * 5 + "$", page, re.MULTILINE)
    assert [row[0] for row in rows] == list(medians)
    for number, *figures in rows:
        expected = [medians[number][phase] for phase in (*restart.PHASES, "all")]
        assert [float(figure) for figure in figures] == pytest.approx(expected, rel=0.03, abs=0.006)


def test_a_benchmark_starts_the_recipe_with_flags_that_it_knows(monkeypatch, tmp_path):
    def launch(processes, log, script, *words):
        config = options.parse(nlp.Config, [str(word) for word in words])
        output = Path(config.output_dir)
        output.mkdir(parents=True)
        figures = {"mfu": 0.5, "tokens_per_second": 100.0, "padding": 0.1, "loss": 1.0}
        lines = [json.dumps({"step": step} | figures) for step in range(1, 7)]
        (output / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    monkeypatch.setattr(launching, "launch", launch)
    files = {"train_file": "train.parquet", "validation_file": "validation.parquet"}
    monkeypatch.setattr(encoder_and_texts, "prepare", lambda *_, **__: files | {"model_name_or_path": "encoder"})
    monkeypatch.setattr(sys, "argv", ["utilisation.py", "--rounds", "2", "--output_dir", str(tmp_path)])
    utilisation.main()
    assert "| mfu, wide bf16 | " in (tmp_path / "utilisation.md").read_text()


@pytest.mark.parametrize("work", peers.WORKS)
def test_every_recipe_is_started_with_flags_that_it_knows(monkeypatch, tmp_path, work):
    monkeypatch.setattr(sys, "argv", ["peers.py", "--work", work, "--epochs", "3", "--model_name_or_path", "model"])
    arguments = peers.parse()
    data = dict.fromkeys(peers.FILES.values(), tmp_path / "file")
    recipe = importlib.import_module(f"recipes.{peers.WORKS[work].recipe}")
    words = peers.recipe_words(arguments, data, "recipe --logging_steps 7", tmp_path, seed=4)
    config = options.parse(recipe.Config, words)
    assert (config.num_train_epochs, config.logging_steps, config.seed) == (3, 7, 4)
    assert config.output_dir == str(tmp_path)


def test_the_page_has_the_tables_made_from_the_results():
    assert results_table.tables() in results_table.PAGE.read_text()
