"""Tests of images that need a GPU; `make gpu-tests` runs them. None has run on a GPU yet."""

import io
import sys

import numpy as np
import pytest
import runs
import torch
from accelerate.state import AcceleratorState, PartialState
from PIL import Image

sys.path.insert(0, str(runs.ROOT))

from benchmarks.harness.host_waits import HostWaits
from benchmarks.harness.photos import write_photos
from shared.config import options
from shared.images import gpu_decoding
from shared.images.decoding import Square, decode
from shared.monitoring import evaluation, tracking

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
    monkeypatch.setattr(evaluation.Metrics, "compute", lambda self, *_: dict.fromkeys(self.names, 0.0))
    monkeypatch.setattr(tracking, "draw_curves", lambda *_: None)
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


def test_nvjpeg_gives_the_pixels_of_pillow_where_color_has_full_resolution():
    """With color at half resolution, nvJPEG repeats each stored color where Pillow interpolates."""
    pytest.importorskip("torchcodec")
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8)).resize((120, 90), Image.Resampling.BICUBIC)
    for subsampling, within in ((0, 2), (2, 60)):
        files = [io.BytesIO() for _ in range(3)]
        for quality, file in zip((80, 90, 95), files, strict=True):
            image.save(file, "JPEG", quality=quality, subsampling=subsampling)
        jpegs = [torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8) for file in files]
        found = gpu_decoding.decode_jpegs(jpegs, SIZE, "bilinear", torch.device("cuda"))
        for file, square in zip(files, found, strict=True):
            expected = decode(file.getvalue(), Square(SIZE))[0].astype(int)
            assert np.abs(square.cpu().numpy() - expected).max() <= within
            assert np.abs(square.cpu().numpy() - expected).mean() < 4


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_decodes_on_the_gpu_trains_as_with_pillow_and_never_waits(train, photos, workers):
    pytest.importorskip("torchcodec")
    flags = ["--train_dir", photos, "--decode_size", 32, "--global_batch_size", 8, "--dataloader_num_workers", workers]
    on_gpu = train("torchcodec", *flags, "--image_decoder", "torchcodec", watch="error")
    assert on_gpu == pytest.approx(train("pillow", *flags), rel=0.1)


@pytest.mark.parametrize("flags", [["--cudnn_benchmark"], ["--channels_last", "false"]])
def test_convolutions_of_another_kind_train_the_same(train, flags):
    assert train("other", *flags) == pytest.approx(train("usual"), rel=0.05)
