"""Every test of predictions runs in a process that no launcher started, on a CPU."""

import pytest


@pytest.fixture(autouse=True)
def one_process(one_cpu_process_without_a_picture, launched_by_nobody):
    """A process that no launcher started, on a CPU."""
