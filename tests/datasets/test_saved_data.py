"""Large data sets of `datasets` stay on disk, with all selections of their rows, and are the same as in memory."""

import pytest
from table_files import loaded

from shared.datasets import arrow_files
from shared.datasets.rows import content_of
from shared.datasets.tables import read_saved

pytestmark = pytest.mark.usefixtures("own_cache")

datasets = pytest.importorskip("datasets")


def save(folder, labels, **features):
    """Write a data set of numbered texts with these labels, in two files."""
    rows = {"text": [f"text {i}" if i % 7 else " " for i in range(len(labels))], "label": labels}
    described = datasets.Features({"text": datasets.Value("string"), **features}) if features else None
    datasets.Dataset.from_dict(rows, features=described).save_to_disk(folder, num_shards=2)
    return str(folder)


@pytest.mark.parametrize(
    ("labels", "features"),
    [
        ([i % 3 - (i % 11 == 0) for i in range(60)], {"label": datasets.ClassLabel(names=["a", "b", "c"])}),
        ([["x"] * (i % 2) + ["y"] * (i % 3 == 0) for i in range(60)], {}),
        ([i / 4 for i in range(60)], {}),
    ],
)
def test_a_large_saved_data_set_has_the_parts_and_targets_of_a_small_one(tmp_path, labels, features):
    folder = save(tmp_path / "saved", labels, **features)
    small, large = loaded(dataset_name=folder, skip_incomplete_rows=True, max_train_samples=20, max_eval_samples=3)
    assert small == large
    assert not isinstance(small, str)


def test_a_saved_data_set_that_is_written_again_has_another_content(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_files, "IN_MEMORY", -1)
    folder = save(tmp_path / "saved", [0, 1] * 9)
    first = read_saved(folder)["train"]
    assert content_of(read_saved(folder)["train"]) == content_of(first)
    save(tmp_path / "other", [1, 0] * 9)
    (tmp_path / "saved").rename(tmp_path / "before")
    (tmp_path / "other").rename(tmp_path / "saved")
    assert content_of(read_saved(folder)["train"]) != content_of(first)
