"""The benchmark of checkpoints that several processes write together runs, and reports each way of writing."""

import json

import pytest
import runs

WAYS = ["shared", "alone", "plain"]


@pytest.mark.docs  # docs/checkpoints.md has its command
def test_two_processes_write_a_checkpoint_and_the_benchmark_compares_them_with_one(tmp_path):
    flags = ["--gigabytes", 0.05, "--rounds", 2, "--output_dir", tmp_path]
    codes, printed = runs.run_forked(2, "benchmarks/checkpoint_shares.py", flags, tmp_path)
    assert codes == [0, 0], printed
    report = json.loads((tmp_path / "checkpoint_shares.json").read_text())
    assert report["command"].startswith("torchrun --nproc-per-node 2 benchmarks/checkpoint_shares.py --gigabytes 0.05")
    assert [row["contestant"] for row in report["rows"]] == [*WAYS, *WAYS[1:], WAYS[0]]
    assert all(row["gigabytes_per_second"] * row["seconds"] == pytest.approx(0.05, rel=0.1) for row in report["rows"])
    assert list(report["comparisons"]) == ["speed, shared / alone", "speed, shared / plain", "speed, alone / plain"]
    assert not (tmp_path / "files").exists()
