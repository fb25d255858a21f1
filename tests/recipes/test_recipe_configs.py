"""Each config in recipes/configs trains for two steps, with substitutes for its images."""

import numpy as np
import pytest
import runs
import yaml
from PIL import Image

from shared.config import options
from shared.monitoring import tracking

ALL = sorted((runs.ROOT / "recipes/configs").glob("*.yaml"))
CONFIGS = [path for path in ALL if "image_column_name" in path.read_text()]
# Small enough for a test; everything else is the config's.
SMALLER = [
    *("--global_batch_size", 4, "--per_device_train_batch_size", 2, "--max_train_steps", 2, "--eval_steps", 2),
    *("--logging_steps", 1, "--checkpointing_steps", "no", "--image_size", 64, "--resize_size", 72),
    *("--decode_size", 80, "--dataloader_num_workers", 0),
]


def test_there_are_configs():
    assert {"imagenet_resnet50.yaml", "cifar10_resnet18.yaml"} <= {path.name for path in CONFIGS}
    # Those of recipes/mlm.py have their own test beside it.
    assert {"modernbert_base.yaml", "bert_base.yaml"} == {path.name for path in ALL} - {path.name for path in CONFIGS}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_is_understood_in_full_and_trains(path, tmp_path, monkeypatch):
    import datasets

    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tracking, "draw_curves", lambda *_: None)
    recipe = runs.load_recipe("image_classification")
    said = yaml.safe_load(path.read_text())
    as_it_is = options.parse(recipe.Config, ["--config", str(path)])
    assert {name: str(getattr(as_it_is, name)) for name in said} == {
        name: str(tuple(value) if isinstance(value, list) else value) for name, value in said.items()
    }
    rng = np.random.default_rng(0)
    pictures = [Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)) for _ in range(40)]
    columns = {said["image_column_name"]: pictures, said["label_column_name"]: [i % 2 for i in range(40)]}
    features = datasets.Features(
        {said["image_column_name"]: datasets.Image(), said["label_column_name"]: datasets.ClassLabel(names=["a", "b"])}
    )
    stand_in = datasets.Dataset.from_dict(columns, features=features)
    datasets.DatasetDict({"train": stand_in}).save_to_disk(tmp_path / "images")
    flags = ["--config", path, "--dataset_name", tmp_path / "images", *SMALLER, "--output_dir", tmp_path / "run"]
    recipe.main(options.parse(recipe.Config, [str(word) for word in flags]))
    losses = [line["loss"] for line in runs.training_lines(tmp_path / "run")]
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    assert (tmp_path / "run/model/model.safetensors").stat().st_size > 4 * 10_000_000  # the model of the config
