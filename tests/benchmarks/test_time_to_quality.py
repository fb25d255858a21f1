"""The tables of benchmarks/time_to_quality.py state what its runs say, and the clock counts training steps only."""

import math

import pytest
import runs

from benchmarks import time_to_quality
from benchmarks.harness import rounds

TASK = {"title": "Work", "recipe": "image_classification", "score": "eval_accuracy", "target": 0.5, "better": "higher"}
TASK |= {"flags": " ".join(map(str, [*runs.TINY_IMAGES, "--max_train_steps", 4, "--eval_steps", 2]))}
TASK |= {"contestants": {name: {"flags": "--optim adamw", "learning_rates": [1, 2, 4]} for name in ("one", "other")}}


def made(contestant, rate, seed, steps, seconds, final):
    found = {"task": "work", "contestant": contestant, "learning_rate": rate, "seed": seed, "curve": []}
    return found | {"steps": steps, "cpu_seconds": seconds, "final": final}


def test_the_table_has_ratios_to_the_first_contestant_and_p_values():
    """Of two contestants with three seeds each; "other" needs 2, 2.5 and 3 times the CPU seconds."""
    rates = [(name, rate) for name in ("one", "other") for rate in (1.0, 4.0)]
    grid = [made(name, rate, time_to_quality.TUNING, 8 / rate, 1.0, 0.7) for name, rate in rates]
    each = [made("one", 4.0, seed, 4, 10.0, 0.6 + seed / 10) for seed in range(3)]
    each += [made("other", 4.0, seed, 8, 20.0 + 5 * seed, 0.5) for seed in range(3)]
    about = {"machine": rounds.machine(1), "threads": 1, "command": "python x", "tasks": {"work": TASK}}
    lines = time_to_quality.tables(about | {"runs": grid + each}).splitlines()
    one, other = (next(line for line in lines if line.startswith(f"| {name} ")) for name in ("one", "other"))
    assert one == f"| one | 4 | 3 of 3 | 4, 4, 4 | 10.0 | 0.700 ± 0.100 |{' - |' * 4}"
    name, rate, reached, steps, seconds, last, ratio, p, of_seconds, both = other.strip("| ").split(" | ")
    assert (name, rate, reached, steps, seconds) == ("other", "4", "3 of 3", "8, 8, 8", "25.0")
    assert (last, ratio, p) == ("0.500 ± 0.000", "2.000", "-")  # the same ratio with each seed has no deviation
    assert float(of_seconds) == pytest.approx((2 * 2.5 * 3) ** (1 / 3), abs=1e-3)
    student, wilcoxon = map(float, both.split(", "))
    logs = [math.log(2), math.log(2.5), math.log(3)]
    mean = sum(logs) / 3
    t = mean / math.sqrt(sum((each - mean) ** 2 for each in logs) / 2 / 3)
    assert student == pytest.approx(1 - t / math.sqrt(t * t + 2), rel=0.05)  # Student's distribution of 2 degrees
    assert wilcoxon == 0.25


def test_a_run_reaches_its_target_at_an_evaluation_and_the_same_run_is_not_made_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    task = TASK | {"target": 0.0, "contestants": {"one": {"flags": "--optim adamw", "learning_rates": [0.01]}}}
    report = {"machine": rounds.machine(1), "threads": 1, "command": "python x", "tasks": {"work": task}, "runs": []}
    for _ in range(2):
        time_to_quality.measure("work", task, 1, report, tmp_path)
    assert [each["seed"] for each in report["runs"]] == [time_to_quality.TUNING, 0]
    for each in report["runs"]:
        (first, second) = each["curve"]
        assert [first[0], second[0]] == [2, 4]
        assert (each["steps"], each["cpu_seconds"], each["final"]) == (2, first[1], second[2])
        assert 0 < first[1] < second[1]
    assert (tmp_path / "time_to_quality.md").read_text() == time_to_quality.tables(report)
