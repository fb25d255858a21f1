"""An Accelerator on one CPU for the tests of Accelerate's interfaces."""

import pytest
from accelerate import Accelerator

from shared.compat import of_accelerate


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    of_accelerate.reset_state(processes=True)
    yield Accelerator(cpu=True)
    of_accelerate.reset_state(processes=True)
