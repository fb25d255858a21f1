"""Fixtures of the tests of extras."""

import pytest
from logging_run import LoggingRun

from shared.extras.time_report import TimeReport


@pytest.fixture
def start(accelerator, tmp_path):
    """Start a run in `tmp_path` that only logs, without a picture, which takes a second."""
    started = []

    def start(**changes):
        started.append(LoggingRun(accelerator, tmp_path, **{"hooks": [TimeReport()]} | changes))
        return started[-1]

    yield start
    for run in started:
        run.close()
