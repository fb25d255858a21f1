"""The benchmark of large data plans every size and every process, and writes what it found."""

import json
import sys

import pytest

from benchmarks import scale


def test_it_writes_a_row_per_size_and_the_processes_read_each_sample_once(monkeypatch, tmp_path):
    words = ["--rounds", 1, "--steps", 2, "--global_batch_size", 64, "--processes", 12, "--samples", 1000, 3000]
    words += ["--images_per_process", *scale.BATCHES]
    monkeypatch.setattr(sys, "argv", ["scale.py", *map(str, words), "--output_dir", str(tmp_path / "out")])
    scale.main()
    report = json.loads((tmp_path / "out/scale.json").read_text())
    assert [(row["contestant"], row["samples"]) for row in report["rows"]] == [("1,000", 1000), ("3,000", 3000)]
    assert all(row[figure] > 0 for row in report["rows"] for figure in scale.FIGURES)
    assert report["comparisons"]["step_cpu_ms, 3,000 / 1,000 samples"]["median"] == pytest.approx(
        report["rows"][1]["step_cpu_ms"] / report["rows"][0]["step_cpu_ms"]
    )
    for each in scale.BATCHES:
        for of in ("samples", "images"):
            found = report["comparisons"][f"CPU ms of one of 12 processes, {12 * each:,} {of} (each sample once)"]
            assert found["each_sample_once"]
    assert "| 3,000 | " in (tmp_path / "out/scale.md").read_text()
    assert not (tmp_path / "out/runs/lengths").exists()
