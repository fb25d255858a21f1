"""A checkpoint of the older format, written by the last version that had it, is loaded bit by bit."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from shared.checkpoints import resuming
from shared.checkpoints.progress import Progress
from shared.config.options import Options
from shared.optimization.optimizers import make_optimizer

FOLDER = Path(__file__).parent / "older_format"


@pytest.fixture
def accelerator():
    accelerator = Accelerator(cpu=True)
    yield accelerator
    accelerator.scaler = None
    accelerator.free_memory()


def test_all_values_are_those_that_were_saved(accelerator):
    """values.safetensors has those that the run had when it saved: model.NAME, average.NAME, optimizer.INDEX.KEY."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    average = AveragedModel(model)
    model, optimizer = accelerator.prepare(model, make_optimizer(model, Options(learning_rate=0.5)))
    accelerator.register_for_checkpointing(average)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    path = FOLDER / "step_00000003"
    assert resuming.problem_with(path) is None
    resuming.load(accelerator, path)
    state = optimizer.optimizer.state_dict()
    found = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    found |= {f"average.{name}": tensor for name, tensor in average.state_dict().items()}
    found |= {f"optimizer.{i}.{key}": value for i, entry in state["state"].items() for key, value in entry.items()}
    expected = load_file(FOLDER / "values.safetensors")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert state["param_groups"][0]["lr"] == 0.01
    assert accelerator.scaler.get_scale() == 1024.0
    progress = Progress.from_state(resuming.read_state(path))
    assert (progress.step, progress.data) == (3, ["a", "b"])
