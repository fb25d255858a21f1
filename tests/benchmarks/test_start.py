"""The benchmark of what one waits for measures to the line that it names, and leaves what it promises."""

import json
import sys
import time

import psutil
import pytest
import runs

sys.path.insert(0, str(runs.ROOT / "benchmarks"))

import start


def test_a_command_is_timed_to_a_line_and_then_ended():
    script = "import time; print('step 0/9'); print('step 1/9'); time.sleep(60)"
    begun = time.monotonic()
    clock, cpu = start.seconds([sys.executable, "-c", script], until="step 1/")
    assert 0 < clock < time.monotonic() - begun < 50
    assert 0 < cpu < 50
    assert not [child for child in psutil.Process().children() if script in child.cmdline()]


def test_a_command_that_ends_before_that_line_is_an_error_with_its_words():
    with pytest.raises(RuntimeError, match=r"ended before 'step 1/':\nno luck"):
        start.seconds([sys.executable, "-c", "print('no luck')"], until="step 1/")


def test_it_leaves_a_row_for_what_was_asked_beside_what_is_promised(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(start, "PLANS", 3)
    words = ["start.py", "--rounds", "2", "--only", "plan", "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    start.main()
    found = json.loads((tmp_path / "out/start.json").read_text())
    (row,) = found["rows"]
    assert (row["what"], row["promised_seconds"]) == ("plan of a step of 4,096 samples", 0.005)
    assert len(row["seconds"]) == len(row["cpu_seconds"]) == 2
    assert "cores" in found["machine"]
    assert "| plan of a step of 4,096 samples | 0.005 |" in capsys.readouterr().out


def test_every_recipe_and_every_promise_has_a_measurement(tmp_path):
    names = list(start.measurements(tmp_path))
    assert {f"--help of {path.name}" for path in runs.ROOT.glob("recipes/*.py")} <= set(names)
    assert sum("refusal" in name for name in names) == 4
    assert {"the embedded docstrings, gathered", "launch of the demo to its first step"} <= set(names)
