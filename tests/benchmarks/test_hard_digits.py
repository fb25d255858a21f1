"""The hard digits of docs/results.md are functions of the seed, and no digit is in both parts."""

import io

import numpy as np
from PIL import Image

from benchmarks.harness import hard_digits


def test_the_images_are_functions_of_the_seed_and_the_files_hold_them(monkeypatch):
    monkeypatch.setattr(hard_digits, "COPIES", 0.1)
    parts = hard_digits.draw()
    assert [images.shape for images, _ in parts] == [(135, 32, 32), (45, 32, 32)]
    for (images, labels), table, (others, _) in zip(parts, hard_digits.tables(), hard_digits.draw(1), strict=True):
        stored = [np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in table["image"].to_pylist()]
        assert np.array_equal(np.stack(stored), images)
        assert table["label"].to_pylist() == [*map(str, labels)]
        assert not np.array_equal(others, images)


def test_no_digit_is_in_both_parts(monkeypatch):
    monkeypatch.setattr(hard_digits, "spoiled", lambda digit, _: digit)
    train, validation = ({digit.tobytes() for digit in images} for images, _ in hard_digits.draw())
    assert len(train) + len(validation) == 1797
    assert not train & validation
