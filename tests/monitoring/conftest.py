"""Fixtures of the monitoring tests."""

import pytest
from accelerate import Accelerator

from shared.monitoring import monitor, tracking
from shared.monitoring.tracking import Tracker, cut_metrics


@pytest.fixture
def accelerator():
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.trackers.clear()


@pytest.fixture
def start(accelerator, tmp_path, monkeypatch):
    """Start a Tracker in `tmp_path`, as a recipe does, but without the picture, which takes a second."""
    monkeypatch.setattr(tracking, "draw_curves", lambda *_: None)
    started = []

    def start(**changes):
        arguments = {"report_to": ["none"], "project": "p", "run_name": None, "run_id": None, "step": 0}
        arguments["config"] = {"seed": 1, "nested": {"rate": 1e-4, "none": None}}
        cut_metrics(tmp_path / "metrics.jsonl", changes.get("step", 0))
        tracker = Tracker(accelerator, tmp_path, total_steps=1000, **(arguments | changes))
        started.append(tracker)
        return tracker

    yield start
    for tracker in started:
        tracker.close()


@pytest.fixture
def clock(monkeypatch):
    """A clock in seconds that only the test advances."""
    now = [100.0]
    monkeypatch.setattr(monitor.time, "perf_counter", lambda: now[0])
    return now
