"""Nothing with an entry for each image is in the memory of a process, and the images are those of a small data set."""

import datasets
import numpy as np
import pyarrow.parquet
import pytest
from large_data import traced
from small_images import EIGHT, config, folders
from small_images import tables as image_tables

from shared.cache import prepared
from shared.cache.prepared import mapped_file
from shared.datasets import rows as table_rows
from shared.datasets import tables
from shared.images import cache as image_cache
from shared.images import images, sources
from shared.images.sources import class_folders, load_images, load_sources


@pytest.mark.parametrize("each", [20_000, pytest.param(350_000, marks=pytest.mark.docs)])
def test_the_paths_and_classes_of_many_images_take_no_memory(tmp_path, monkeypatch, each):
    """Made-up names in three folders; of these, a fifth is held out, and a limit keeps some of the others."""
    for label in "abc":
        (tmp_path / label).mkdir()
    monkeypatch.setattr(sources, "images_below", lambda *_: (f"n0144_{i}.JPEG" for i in range(each)))
    monkeypatch.setattr(sources, "checked", lambda source: source)
    at_once = each // 20
    limits = (images, "BLOCK"), (sources, "AT_ONCE"), (table_rows, "BLOCK_ROWS")
    for module, name in (*limits, (prepared, "IN_MEMORY")):
        monkeypatch.setattr(module, name, at_once)
    # The choice of rows takes memory, in one process for a moment; here, the rows are chosen by their places.
    monkeypatch.setattr(tables, "share_of_each", lambda targets, *_: np.tile(np.arange(5) == 0, len(targets) // 5))
    monkeypatch.setattr(tables, "smallest", lambda count, most, *_: np.repeat([True, False], [most, count - most]))
    given = config(train_dir=str(tmp_path), max_train_samples=each)
    with traced() as memory:
        source = class_folders(str(tmp_path), "--train_dir")
        train, validation = load_sources(given)
    assert memory.kept < 1 << 17
    assert memory.peak < (3 << 19) + 8 * each  # row numbers and classes alone would take 48 * each
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
        given.train_file = str(tmp_path / "paths.parquet") if kind == "paths" else image_tables(tmp_path, rows=20)
    if kind == "numbers":
        given.label_column_name = "row"

    def read():
        found = []
        for data in load_images(given, EIGHT, problem):
            micro_batch = data.read_micro_batch(np.arange(len(data)), np.zeros(len(data), int))
            pixels, _, targets = zip(*micro_batch, strict=True) if isinstance(micro_batch, list) else micro_batch
            found.append((data.digest(), data.rows.tolist(), np.stack(pixels).tolist(), [*map(int, targets)]))
            mapped.append({mapped_file(array) is not None for array in (data.rows, data.targets)})
        return found

    mapped = []
    few = read()
    assert mapped == [{False}] * 2
    monkeypatch.setattr(prepared, "IN_MEMORY", -1)
    monkeypatch.setattr(table_rows, "IN_MEMORY", -1)
    monkeypatch.setattr(images, "BLOCK", 3)
    monkeypatch.setattr(image_cache, "SMALLEST_CHECKED", 2)
    assert read() == few
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "another"))
    mapped.clear()
    assert read() == few
    assert mapped == [{True}] * 2
