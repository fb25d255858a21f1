"""No step of a recipe makes the host wait for the device. On a CPU, the operations that would wait are counted."""

import pytest
import runs

from benchmarks.harness.host_waits import HostWaits
from shared.encoders import attention

FLAGS = {
    "nlp": runs.TINY,
    "nlp rows": [*runs.TINY, "--no_packing"],
    "mlm": [*runs.TINY, "--max_tokens_per_micro_batch", "300"],
    "embeddings": [*runs.TINY, "--text_column_names", "text", "label", "--symmetric"],
    "image_classification": [
        *(*runs.TINY_IMAGES, "--trivial_augment", "--color_jitter", "0.2", "--random_erasing", "0.5", "--cutmix", "1"),
    ],
}


@pytest.fixture
def count_waits(texts, tmp_path, monkeypatch):
    """A function that trains with a recipe in this process on one CPU and returns the counted waits."""
    monkeypatch.setattr(attention, "small_mask", attention.always_masked)  # the masks of a GPU

    def call(recipe, flags):
        data = [] if hasattr(recipe.Config, "train_dir") else texts
        with HostWaits(recipe) as waits:
            runs.train(recipe, tmp_path, *data, *flags, "--max_train_steps", 3, "--logging_steps", 3)
        return waits

    return call


@pytest.mark.parametrize("name", FLAGS)
def test_no_step_waits(count_waits, name):
    waits = count_waits(runs.load_recipe(name.split()[0]), FLAGS[name])
    assert len(waits.steps) == 3
    assert not waits.where


def test_a_norm_that_is_read_in_each_step_is_found(count_waits, monkeypatch):
    recipe = runs.load_recipe("image_classification")
    clip = recipe.gradients.clip
    monkeypatch.setattr(recipe.gradients, "clip", lambda *args: (norm := clip(*args), norm.item())[0])
    waits = count_waits(recipe, FLAGS["image_classification"])
    assert waits.steps == [1, 1, 1]
    assert [where for where in waits.where if where.startswith("_local_scalar_dense at")]
