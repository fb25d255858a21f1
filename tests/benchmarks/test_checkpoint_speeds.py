"""The benchmark of writing and loading checkpoints of a given size, with a small one."""

import json
import sys

import pytest

from benchmarks import checkpoints


@pytest.mark.docs  # its command is in docs/checkpoints.md
def test_a_small_size_is_written_and_loaded_in_each_way(monkeypatch, tmp_path):
    flags = ["--gigabytes", "0.06", "--rounds", "1", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks/checkpoints.py", *flags])
    checkpoints.main()
    (found,) = json.loads((tmp_path / "checkpoints_large_cpu.json").read_text())["sizes"]
    assert found["gigabytes"] == pytest.approx(0.06, rel=0.2)
    writing, reading = found["writing"], found["reading"]
    assert [row["contestant"] for row in writing["rows"]] == [*checkpoints.WRITERS]
    assert set(writing["speed_of_ours_against"]) == {*checkpoints.WRITERS} - {"ours"}
    ways = [f"{way} {cache}" for cache in ("cold", "warm") for way in checkpoints.READERS]
    assert [row["contestant"] for row in reading["rows"]] == ways
    assert set(reading["speed_of_ours_against"]) == {"load_state cold", "load_state warm"}
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoints_large_cpu.json"]
