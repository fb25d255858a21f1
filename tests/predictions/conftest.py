"""Every test of predictions runs in a process that no launcher started, on a CPU."""

import pytest
from predicting import read_csv


@pytest.fixture(autouse=True)
def one_process(one_cpu_process_without_a_picture, launched_by_nobody, monkeypatch):
    """A process that no launcher started, on a CPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # restored after an export has set it


@pytest.fixture(scope="module")
def rows(texts):
    """The rows of the validation file: [{"text": ..., "label": ...}, ...]."""
    return read_csv(texts[3])
