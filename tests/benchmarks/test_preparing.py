"""The benchmarks of preparing data and of data behind a URL run and write results; no test depends on a speed."""

import json
import sys

import pytest
import runs

from benchmarks import preparing


@pytest.mark.docs  # its command is in docs/pretraining.md
def test_one_and_two_processes_prepare_texts_and_images(tmp_path):
    script = runs.ROOT / "benchmarks/preparing.py"
    small = ["--rounds", 1, "--megabytes", 1, "--rows", 200, "--words", 2000, "--photos", 20]
    runs.succeed([sys.executable, script, *small, "--output_dir", tmp_path])
    report = json.loads((tmp_path / "preparing.json").read_text())
    kinds = [f"{kind}, {n}" for kind in preparing.KINDS for n in ("1 process", "2 processes")]
    assert [row["contestant"] for row in report["rows"]] == kinds
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 and row["peak_mib"] > 50 for row in report["rows"])
    assert all(50 < row["own_mib"] < row["peak_mib"] for row in report["rows"])
    assert len(report["comparisons"]) == 2 * len(preparing.KINDS)


@pytest.mark.docs  # its command is in docs/pretraining.md
def test_runs_from_a_url_take_turns(tmp_path):
    script = runs.ROOT / "benchmarks/remote_shards.py"
    small = [*("vocab_size", 2000), *("max_train_samples", 300), *("global_batch_size", 8), *("logging_steps", 1)]
    flags = ["--rounds", 1, "--steps", 3, "--output_dir", tmp_path, "--flags", *small]
    runs.succeed([sys.executable, script, *flags], timeout=500)
    report = json.loads((tmp_path / "remote_shards.json").read_text())
    found = {row["contestant"]: row for row in report["rows"]}
    assert [*found] == ["folder", "url", "url, small cache", "url, small cache, 2 workers"]
    assert all(0 < row["data_percent"] < 100 and row["step_seconds"] > 0 for row in found.values())
    assert found["folder"]["requests"] == 0
    assert all(row["requests"] > 0 for name, row in found.items() if name != "folder")
