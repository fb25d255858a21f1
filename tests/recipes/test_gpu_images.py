"""Tests of images that need a GPU; `make gpu-tests` runs them. None has run on a GPU yet."""

import pytest
import runs
import torch
from accelerate.state import AcceleratorState, PartialState

from benchmarks.harness.host_waits import HostWaits
from benchmarks.harness.photos import write_photos
from shared.config import options
from shared.extras import curves
from shared.metrics.task_metrics import TaskMetrics

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SIZE = 64


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder with 24 JPEGs of 500 x 375 pixels in two classes."""
    folder = tmp_path_factory.mktemp("photos")
    write_photos(folder, 24)
    return folder


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A function that trains on images on the GPU in this process and returns the losses."""
    monkeypatch.setattr(TaskMetrics, "compute", lambda self, *_: dict.fromkeys(self.names, 0.0))
    monkeypatch.setattr(curves, "draw_curves", lambda *_: None)
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "cache"))

    def call(name, *flags, watch=None):
        AcceleratorState._reset_state(reset_partial_state=True)
        recipe = runs.load_recipe("image_classification")
        words = [
            *runs.TINY_IMAGES,
            "--max_train_steps",
            20,
            "--eval_steps",
            20,
            *flags,
            "--output_dir",
            tmp_path / name,
        ]
        config = options.parse(recipe.Config, [*map(str, words)])
        if watch:
            with HostWaits(recipe, watch) as waits:
                recipe.main(config)
            assert not waits.where
        else:
            recipe.main(config)
        return [line["loss"] for line in runs.metrics(tmp_path / name) if "loss" in line]

    yield call
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    torch.backends.cudnn.benchmark = False


@pytest.mark.parametrize("flags", [["--cudnn_benchmark"], ["--channels_last", "false"]])
def test_convolutions_of_another_kind_train_the_same(train, flags):
    assert train("other", *flags) == pytest.approx(train("usual"), rel=0.05)
