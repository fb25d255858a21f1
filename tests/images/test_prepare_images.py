"""`python -m shared.prepare` decodes images ahead of training."""

import re

import pytest
import runs
from small_images import folders

from shared.config import options

RECIPE = runs.ROOT / "recipes/image_classification.py"


@pytest.fixture
def flags(tmp_path):
    """Flags of recipes/image_classification.py with 40 images."""
    root = folders(tmp_path / "photos", count=20)
    return [*runs.TINY_IMAGES, "--train_dir", str(root), "--cache", "uint8", "--output_dir", str(tmp_path / "run")]


def test_training_with_the_same_flags_finds_the_images_that_two_processes_decoded(flags, tmp_path, monkeypatch):
    codes, output = runs.run_forked(2, "shared/prepare.py", [RECIPE, *flags], tmp_path)
    assert codes == [0, 0], output
    assert "Traceback" not in output
    assert re.findall(r"^(training|validation) +(\d+) images$", output, re.MULTILINE) == [
        ("training", "32"),
        ("validation", "8"),
    ]

    runs.forbid_preparing(monkeypatch)
    recipe = runs.load_recipe("image_classification")
    train, validation, *_ = recipe.load_data(options.parse(recipe.Config, flags))
    assert (len(train), len(validation)) == (32, 8)
