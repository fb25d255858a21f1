"""The benchmark of preparing data runs and writes results; no test depends on a speed."""

import json
import sys

import pytest
import runs

from benchmarks import preparing


@pytest.mark.docs  # its command is in docs/pretraining.md
def test_one_and_two_processes_prepare_texts_and_images(tmp_path):
    script = runs.ROOT / "benchmarks/preparing.py"
    small = ["--rounds", 1, "--megabytes", 1, "--rows", 200, "--photos", 20]
    runs.succeed([sys.executable, script, *small, "--output_dir", tmp_path])
    report = json.loads((tmp_path / "preparing.json").read_text())
    kinds = [f"{kind}, {n}" for kind in preparing.KINDS for n in ("1 process", "2 processes")]
    assert [row["contestant"] for row in report["rows"]] == kinds
    assert all(row["seconds"] > 0 and row["cpu_seconds"] > 0 and row["peak_mib"] > 50 for row in report["rows"])
    assert all(50 < row["own_mib"] < row["peak_mib"] for row in report["rows"])
    assert len(report["comparisons"]) == 2 * len(preparing.KINDS)
