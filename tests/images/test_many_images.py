"""Images of many rows: how they are held out, and that the cache and its blocks do not change them."""

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from small_images import EIGHT, config, folders, tables

from shared.cache import prepared
from shared.datasets import rows as table_rows
from shared.images import cache as image_cache
from shared.images import sources
from shared.images.sources import class_folders, load_images, load_sources


def test_the_images_of_folders_are_held_out_by_class(tmp_path, monkeypatch):
    """Made-up names in three folders; of these, a fifth is held out, and a limit keeps some of the others."""
    each = 1000
    for label in "abc":
        (tmp_path / label).mkdir()
    monkeypatch.setattr(sources, "images_below", lambda *_: (f"n0144_{i}.JPEG" for i in range(each)))
    monkeypatch.setattr(sources, "checked", lambda source: source)
    source = class_folders(str(tmp_path), "--train_dir")
    train, validation = load_sources(config(train_dir=str(tmp_path), max_train_samples=each))
    assert source.stored(2 * each + 7) == tmp_path / "c/n0144_7.JPEG"
    assert source.sizes().tolist() == [each] * 3
    assert validation.sizes().tolist() == [each // 5] * 3
    assert len(np.union1d(train.rows, validation.rows)) == len(train) + len(validation) == each * 8 // 5
    assert np.array_equal(train.targets, train.rows // each)


@pytest.mark.parametrize("settings", [{}, {"cache": "uint8"}, {"max_train_samples": 9, "max_eval_samples": 3}])
@pytest.mark.parametrize("kind", ["folders", "paths", "parquet", "saved", "numbers"])
def test_many_images_are_those_of_few(tmp_path, monkeypatch, kind, settings):
    root = folders(tmp_path / "photos", corrupt=[4])
    files = sorted(root.rglob("*.png"))
    columns = {"image": [str(file) for file in files], "label": [file.parent.name for file in files]}
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "paths.parquet")
    given = config(skip_corrupt_images=True, **settings)
    problem = "regression" if kind == "numbers" else "single_label_classification"
    if kind == "folders":
        given.train_dir = str(root)
    elif kind == "saved":
        rows = {"image": [file.read_bytes() for file in files], "label": columns["label"]}
        datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved", num_shards=3)
        given.dataset_name = str(tmp_path / "saved")
    else:
        given.train_file = str(tmp_path / "paths.parquet") if kind == "paths" else tables(tmp_path, rows=20)
    if kind == "numbers":
        given.label_column_name = "row"

    def read():
        found = []
        for data in load_images(given, EIGHT, problem):
            micro_batch = data.read_micro_batch(np.arange(len(data)), np.zeros(len(data), int))
            pixels, _, targets = zip(*micro_batch, strict=True) if isinstance(micro_batch, list) else micro_batch
            found.append((data.digest(), data.rows.tolist(), np.stack(pixels).tolist(), [*map(int, targets)]))
        return found

    few = read()
    monkeypatch.setattr(prepared, "IN_MEMORY", -1)
    monkeypatch.setattr(table_rows, "IN_MEMORY", -1)
    monkeypatch.setattr(image_cache, "SMALLEST_CHECKED", 2)
    assert read() == few
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "another"))
    assert read() == few
