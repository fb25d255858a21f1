"""The benchmark of waits measures the time until a given line is printed, and writes it next to the promised limit."""

import json
import sys
import time

import psutil
import pytest
import runs

sys.path.insert(0, str(runs.ROOT))

from benchmarks import waits_before_training


def test_a_command_is_timed_until_it_prints_a_line_and_then_ended():
    script = "import time; print('step 0/9'); print('step 1/9'); time.sleep(60)"
    begun = time.monotonic()
    clock, cpu = waits_before_training.seconds([sys.executable, "-c", script], until="step 1/")
    assert 0 < clock < time.monotonic() - begun < 50
    assert 0 < cpu < 50
    assert not [child for child in psutil.Process().children() if script in child.cmdline()]


def test_a_command_that_ends_before_that_line_is_an_error_with_its_output():
    with pytest.raises(RuntimeError, match=r"ended before 'step 1/':\nno luck"):
        waits_before_training.seconds([sys.executable, "-c", "print('no luck')"], until="step 1/")


def test_the_script_writes_a_row_with_the_measured_and_the_promised_seconds(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(waits_before_training, "PLANS", 3)
    words = ["waits_before_training.py", "--rounds", "2", "--only", "plan", "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    waits_before_training.main()
    found = json.loads((tmp_path / "out/waits_before_training.json").read_text())
    (row,) = found["rows"]
    assert (row["what"], row["promised_seconds"]) == ("plan of a step of 4,096 samples", 0.005)
    assert len(row["seconds"]) == len(row["cpu_seconds"]) == 2
    assert "cores" in found["machine"]
    assert "| plan of a step of 4,096 samples | 0.005 |" in capsys.readouterr().out


def test_every_recipe_and_every_promise_has_a_measurement(tmp_path):
    names = list(waits_before_training.measurements(tmp_path))
    assert {f"--help of {path.name}" for path in runs.ROOT.glob("recipes/*.py")} <= set(names)
    assert sum("error" in name for name in names) == 4
    assert {"collecting the embedded docstrings", "launch of the demo to its first step"} <= set(names)
