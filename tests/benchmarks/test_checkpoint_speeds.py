"""The benchmark of writing and loading checkpoints of a given size, with a small one."""

import json
import sys

import pytest

from benchmarks import checkpoints


def run(monkeypatch, folder, *flags):
    monkeypatch.setattr(sys, "argv", ["benchmarks/checkpoints.py", *flags, "--output_dir", str(folder)])
    checkpoints.main()


def sizes(folder):
    return json.loads((folder / "checkpoints_large_cpu.json").read_text())["sizes"]


@pytest.mark.docs  # its command is in docs/checkpoints.md
def test_a_small_size_is_written_and_loaded_in_the_ways_that_are_named(monkeypatch, tmp_path):
    flags = ["--gigabytes", "0.06", "--rounds", "2", "--contestants", "plain", "load_state"]
    run(monkeypatch, tmp_path, *flags)
    (found,) = sizes(tmp_path)
    assert found["gigabytes"] == pytest.approx(0.06, rel=0.2)
    writing, reading = found["writing"], found["reading"]
    assert [row["contestant"] for row in writing["rows"]] == ["ours", "plain", "plain", "ours"]
    assert set(writing["speed_of_ours_against"]) == {"plain"}
    ways = {f"{way} {cache}" for way in ("ours", "load_state") for cache in ("cold", "warm")}
    assert {row["contestant"] for row in reading["rows"]} == ways
    assert set(reading["speed_of_ours_against"]) == {"load_state cold", "load_state warm"}
    assert not (tmp_path / "files").exists()


def test_a_size_without_room_is_not_measured_and_the_output_has_the_reason(monkeypatch, tmp_path, capsys):
    run(monkeypatch, tmp_path, "--gigabytes", "1e6")
    (found,) = sizes(tmp_path)
    assert found["not_measured"].startswith("3100000.0 GB of memory are needed, and ")
    assert f"not measured: {found['not_measured']}" in capsys.readouterr().out
    assert not (tmp_path / "files").exists()
