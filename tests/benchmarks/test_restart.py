"""The benchmark of a killed process, and the figures that docs/elasticity.md has of it."""

import json
import re
import sys

import pytest
import runs

from benchmarks import restart


@pytest.mark.docs  # its command is in docs/elasticity.md
def test_a_killed_process_is_noticed_and_its_work_is_done_again(monkeypatch, tmp_path):
    words = ["benchmarks/restart.py", "--processes", "2", "--rounds", "1", "--output_dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    restart.main()
    (row,) = json.loads((tmp_path / "restart.json").read_text())["rows"]
    phases = [row[phase] for phase in restart.PHASES]
    assert min(phases) > 0
    assert sum(phases) == pytest.approx(row["all"])
    assert row["steps"] >= restart.KILLED_AT - restart.SAVED_EVERY
    assert "resumed from step_00000020" in (tmp_path / "runs/2-0/log.txt").read_text()


def test_the_page_has_the_figures_of_the_committed_result():
    medians = json.loads((runs.ROOT / "benchmarks/results/restart.json").read_text())["median_seconds"]
    page = (runs.ROOT / "docs/elasticity.md").read_text()
    rows = re.findall(r"^\| (\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert [row[0] for row in rows] == list(medians)
    for number, *figures in rows:
        expected = [medians[number][phase] for phase in (*restart.PHASES, "all")]
        assert [float(figure) for figure in figures] == pytest.approx(expected, rel=0.03, abs=0.006)
