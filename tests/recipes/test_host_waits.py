"""No step of a recipe makes the host wait for the device. On a CPU, the operations that would wait are counted."""

import pytest
import runs

from benchmarks.harness.host_waits import HostWaits
from shared.encoders import text_models

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
def train(texts, tmp_path, monkeypatch):
    """A function that trains with a recipe in this process on one CPU and returns the counted waits."""
    monkeypatch.setattr(text_models, "small_mask", text_models.always_masked)  # the masks of a GPU

    def call(name, break_it=lambda recipe: None):
        recipe = runs.load_recipe(name.split()[0])
        break_it(recipe)
        data = [] if name == "image_classification" else texts
        with HostWaits(recipe) as waits:
            runs.train(recipe, tmp_path / name, *data, *FLAGS[name], "--max_train_steps", 3, "--logging_steps", 3)
        return waits

    return call


@pytest.mark.parametrize("name", FLAGS)
def test_no_step_waits(train, name):
    waits = train(name)
    assert len(waits.steps) == 3
    assert not waits.where


def test_a_norm_that_is_read_in_each_step_is_found(train):
    def read_norms(recipe):
        step_if_finite = recipe.step_if_finite
        recipe.step_if_finite = lambda accelerator, optimizer, norm: (
            norm.item() and step_if_finite(accelerator, optimizer, norm)
        )

    waits = train("image_classification", read_norms)
    assert waits.steps == [1, 1, 1]
    assert [where for where in waits.where if where.startswith("_local_scalar_dense at")]
