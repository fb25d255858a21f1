"""Each image config in recipes/configs trains for two steps on substitute images."""

import numpy as np
import pytest
import runs
import yaml
from PIL import Image

from shared.config import options

ALL = sorted((runs.ROOT / "recipes/configs").glob("*.yaml"))
CONFIGS = [path for path in ALL if "image_column_name" in path.read_text()]
# Small enough for a test; all other settings are those of the config.
SMALLER = [
    *("--global_batch_size", 4, "--per_device_train_batch_size", 2, "--max_train_steps", 2, "--eval_steps", 2),
    *("--logging_steps", 1, "--checkpointing_steps", "no", "--image_size", 32, "--resize_size", 36),
    *("--decode_size", 40, "--dataloader_num_workers", 0, "--train_image_size", 24),
]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.usefixtures("own_cache")
def test_every_setting_of_a_config_is_read_and_it_trains(path, tmp_path):
    import datasets

    recipe = runs.load_recipe("image_classification")
    settings = yaml.safe_load(path.read_text())
    unchanged = options.parse(recipe.Config, ["--config", str(path)])
    assert {name: str(getattr(unchanged, name)) for name in settings} == {
        name: str(tuple(value) if isinstance(value, list) else value) for name, value in settings.items()
    }
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)) for _ in range(40)]
    columns = {settings["image_column_name"]: pictures, settings["label_column_name"]: ["a", "b"] * 20}
    substitute = datasets.Dataset.from_dict(columns).cast_column(settings["image_column_name"], datasets.Image())
    datasets.DatasetDict({"train": substitute}).save_to_disk(tmp_path / "images")
    runs.train(recipe, tmp_path / "run", "--config", path, "--dataset_name", tmp_path / "images", *SMALLER)
    losses = [line["loss"] for line in runs.training_lines(tmp_path / "run")]
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    assert (tmp_path / "run/model/model.safetensors").stat().st_size > 4 * 10_000_000  # the size of the config's model
