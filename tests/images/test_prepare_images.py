"""`python -m shared.prepare` decodes images ahead of training."""

import re

import numpy as np
import runs
from small_images import folders

from shared.config import options
from shared.images.decoding import decode

RECIPE = runs.ROOT / "recipes/image_classification.py"


def test_training_with_the_same_flags_finds_the_images_that_two_processes_decoded(tmp_path, monkeypatch):
    root = folders(tmp_path / "photos", count=20)
    flags = [*runs.TINY_IMAGES, "--train_dir", str(root), "--cache", "uint8", "--output_dir", str(tmp_path / "run")]
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
    for data in (train, validation):
        for i in range(len(data)):
            assert np.array_equal(data[i][0], decode(data.stored(i), data.square)[0])
