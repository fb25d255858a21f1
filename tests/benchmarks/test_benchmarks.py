"""The benchmarks run and write their results; no test depends on a speed."""

import importlib
import json
import re
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


@pytest.mark.docs  # its command is in docs/checkpoints.md
def test_checkpoints_of_a_small_size_are_written_and_loaded_in_each_way(monkeypatch, tmp_path):
    flags = ["--gigabytes", "0.06", "--rounds", "1", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/checkpoints.py", *flags])
    checkpoints.main()
    (found,) = json.loads((tmp_path / "checkpoints_large_cpu.json").read_text())["sizes"]
    assert found["gigabytes"] == pytest.approx(0.06, rel=0.2)
    ways = [f"{way} {cache}" for cache in ("cold", "warm") for way in checkpoints.READERS]
    for what, contestants in (("writing", [*checkpoints.WRITERS]), ("reading", ways)):
        assert [row["contestant"] for row in found[what]["rows"]] == contestants
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoints_large_cpu.json"]


@pytest.mark.docs  # its command is in docs/pretraining.md
def test_one_and_two_processes_prepare_texts_and_images(tmp_path):
    small = ["--rounds", 1, "--megabytes", 1, "--rows", 200, "--photos", 20, "--output_dir", tmp_path]
    runs.succeed([sys.executable, runs.ROOT / "benchmarks/preparing.py", *small])
    report = json.loads((tmp_path / "preparing.json").read_text())
    kinds = [f"{kind}, {n}" for kind in preparing.KINDS for n in ("1 process", "2 processes")]
    assert [row["contestant"] for row in report["rows"]] == kinds
    assert all(min(row["seconds"], row["cpu_seconds"], row["own_mib"]) > 0 for row in report["rows"])
    assert len(report["comparisons"]) == 2 * len(preparing.KINDS)


@pytest.mark.docs  # its command is in docs/elasticity.md
def test_a_killed_process_is_noticed_and_its_work_is_done_again(monkeypatch, tmp_path):
    words = ["benchmarks/restart.py", "--processes", "2", "--rounds", "1", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    restart.main()
    (row,) = json.loads((tmp_path / "restart.json").read_text())["rows"]
    assert min(row[phase] for phase in restart.PHASES) > 0
    assert row["steps"] >= restart.KILLED_AT - restart.SAVED_EVERY
    assert "resumed from step_00000020" in (tmp_path / "runs/2-0/log.txt").read_text()


def test_the_page_has_the_figures_of_the_committed_result_of_restarts():
    medians = json.loads((runs.ROOT / "benchmarks/results/restart.json").read_text())["median_seconds"]
    page = (runs.ROOT / "docs/elasticity.md").read_text()
    rows = re.findall(r"^\| (\d) \|" + r" ([\d.]+) \|" * 5 + "$", page, re.MULTILINE)
    assert [row[0] for row in rows] == list(medians)
    for number, *figures in rows:
        expected = [medians[number][phase] for phase in (*restart.PHASES, "all")]
        assert [float(figure) for figure in figures] == pytest.approx(expected, rel=0.03, abs=0.006)


@pytest.mark.docs  # its command is in docs/performance.md
def test_the_recipe_and_a_bare_loop_train_the_same_weights_bit_by_bit(tmp_path):
    # Micro-batches have several rows, because those without padding, such as single rows, differ in rounding.
    flags = ["--rounds", 1, "--steps", 2, "--texts", 48, "--global_batch_size", 8]
    runs.succeed([sys.executable, runs.ROOT / "benchmarks/bare_loop_same_batches.py", *flags, "--output_dir", tmp_path])
    report = json.loads((tmp_path / "bare_loop_same_batches.json").read_text())
    assert [row["equal"] for row in report["rows"]] == [True, True]
    assert report["comparisons"]["speed of ours / bare"]["median"] > 0


def test_a_benchmark_starts_the_recipe_with_flags_that_it_knows(monkeypatch, tmp_path):
    def launch(processes, log, script, *words):
        config = options.parse(nlp.Config, [str(word) for word in words])
        output = Path(config.output_dir)
        output.mkdir(parents=True)
        figures = {"step": 5, "mfu": 0.5, "tokens_per_second": 100.0, "padding": 0.1, "loss": 1.0}
        (output / "metrics.jsonl").write_text(json.dumps(figures) + "\n")

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


@pytest.mark.docs  # its command is in docs/embeddings.md
def test_two_contestants_train_one_after_the_other_and_are_compared(monkeypatch, tmp_path):
    names = ["recipe --logging_steps 2", "accelerate"]
    flags = {"rounds": 1, "samples": 128, "validation_samples": 32, "output_dir": tmp_path}
    words = ["peers.py", "--work", "tagging", *launching.flag_words(flags), "--contestants", *names]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", "")  # the benchmark sets it
    peers.main()
    report = json.loads((tmp_path / "tagging.json").read_text())
    assert [row["contestant"] for row in report["rows"]] == names
    for row in report["rows"]:
        assert min(row["processor_seconds"], row["wall_seconds"], row["rate"], row["score"]) > 0
    assert [*report["comparisons"]] == [f"{what}_seconds of {names[0]} / accelerate" for what in ("processor", "wall")]


def test_the_page_has_the_tables_made_from_the_results():
    assert results_table.tables() in results_table.PAGE.read_text()


def test_the_tables_have_the_figures_of_the_files_and_say_what_was_not_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(results_table, "RESULTS", tmp_path)
    assert all("| not measured | " in results_table.line_of(row) for row in results_table.ROWS)
    assert all("| not measured | " in line for work in results_table.WORKS for line in results_table.lines_of(work))
    machine = {"machine": {"cpu": "Z80", "cores": 2, "cores_used": 1}, "command": "python benchmarks/measure.py"}
    speed = {"comparisons": {"speed of ours / bare": rounds.summary([0.997, 0.999])}}
    (tmp_path / "bare_loop_same_batches.json").write_text(json.dumps(machine | speed))
    rows = [
        {"contestant": name, "processor_seconds": seconds, "score": 0.5, "peak_rss_mib": 1024.0}
        for name, seconds in (("recipe", 10.0), ("recipe", 20.0), ("trainer", 30.0), ("trainer", 30.0))
    ]
    (tmp_path / "real_mlm.json").write_text(json.dumps(machine | {"rows": rows}))
    lines = results_table.tables().splitlines()
    where = "[Z80, 1 of 2 cores](../benchmarks/results"
    assert f"| mlm | `trainer` | 30 s | 2.00 | 0.500 | 1,024 MiB | 2 rounds, {where}/real_mlm.json) |" in lines
    (line,) = (line for line in lines if line.startswith("| speed on the same micro-batches |"))
    assert line.endswith(f"| 0.998 (0.997 to 0.999) | ≥ 0.99 | ≥ 0.998 | {where}/bare_loop_same_batches.json) |")
    assert lines.count("python benchmarks/measure.py") == 2
