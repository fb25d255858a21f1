"""Fixtures of the monitoring tests."""

import pytest

from shared.monitoring.log import Log, cut_metrics


@pytest.fixture
def start(accelerator, tmp_path):
    """Begin the log of a run in `tmp_path` at a step, as a run does."""

    def start(step=0):
        cut_metrics(tmp_path / "metrics.jsonl", step)
        return Log(accelerator, tmp_path, step, 1000)

    return start
