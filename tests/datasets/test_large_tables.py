"""Large files become memory-mapped tables, block by block: the same rows, splits, labels and errors as in memory."""

import json
import re

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from table_files import in_both_ways, loaded

from shared.datasets import rows
from shared.datasets.rows import content_of
from shared.datasets.tables import read_file, read_parts, read_saved
from shared.options.data_options import DataOptions

pytestmark = pytest.mark.usefixtures("own_cache")

ROWS = 60


def write(path, labels, columns="label"):
    """Write a file of numbered texts with these labels, in a CSV file in one or several columns."""
    texts = [f"text {i}" for i in range(len(labels))]
    if path.suffix == ".csv":
        lines = [f"{text},{label}\n" for text, label in zip(texts, labels, strict=True)]
        path.write_text("".join([f"text,{columns}\n", *lines]))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts, "label": labels}), path, row_group_size=10)
    else:
        lines = [json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True)]
        path.write_text("\n".join(lines))
    return path


# Reading


def test_values_that_no_type_fits_are_refused_across_blocks(tmp_path):
    path = write(tmp_path / "a.jsonl", [1, 2, 3, "x", "y", "z"])
    _, large = in_both_ways(lambda: read_file(str(path), "--train_file"))
    assert large.startswith(f"--train_file {path}")
    assert "label" in large


def test_a_changed_file_is_converted_again_and_an_unchanged_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "IN_MEMORY", -1)
    path = write(tmp_path / "a.csv", ["a", "b"])
    first = read_file(str(path), "--train_file")
    copy = tmp_path / "b.csv"
    copy.write_bytes(path.read_bytes())
    assert content_of(read_file(str(copy), "--train_file")) == content_of(first), "a copy has the same content"
    path.write_text(path.read_text().replace("text 1", "text 2"))
    changed = read_file(str(path), "--train_file")
    assert content_of(changed) != content_of(first)
    assert changed["text"].to_pylist() == ["text 0", "text 2"]
    assert content_of(changed.slice(1)) is None, "a part of the rows has another content"
    monkeypatch.setattr(rows, "_write", lambda *_: pytest.fail("converted again"))
    assert read_file(str(path), "--train_file").equals(changed)


# Splits and labels

RANDOM = np.random.default_rng(0)
FEW = {"max_train_samples": 9, "max_eval_samples": 3}


@pytest.mark.parametrize(
    ("name", "labels", "settings", "error"),
    [
        ("a.csv", RANDOM.choice(["a", "b", "c d"], ROWS).tolist(), {}, None),
        ("a.csv", RANDOM.choice(["01", "1", "2"], ROWS).tolist(), FEW, None),
        ("a.csv", RANDOM.random(ROWS).round(2).tolist(), {}, None),
        ("a.csv", RANDOM.integers(0, 5, ROWS).tolist(), {"problem_type": "regression"}, None),
        ("a.csv", [0.5] * 20 + [""] * 20 + [1.5] * 20, {"skip_incomplete_rows": True}, None),
        ("a.csv", RANDOM.choice(["x;y", "y", "", "x;z"], ROWS).tolist(), {"delimiter": ";"}, None),
        ("a.jsonl", [["a"], [], ["b", "a"], ["c"]] * 15, {}, None),
        ("a.jsonl", [[0, 1], [1, 0], [1, 1]] * 20, {}, None),
        ("a.parquet", [True, False] * 30, {}, None),
        ("a.csv", [f"{i % 2},{int(i % 3 == 0)}" for i in range(ROWS)], {"label": ["u", "v"]}, None),
        ("a.csv", ["a"] * 20 + [""] * 40, {}, "row 21 of .* has no label in label"),
        ("a.csv", [f"a{i}" for i in range(ROWS)], {}, "has one row of each label"),
        ("a.csv", [f"a{i // 2}" for i in range(200)] + ["b"], {}, "has 101 different values in 201 rows, too many"),
        ("a.csv", [1e300] * 20 + [2.5] * 40, {}, "not finite in float32"),
        ("a.csv", [0.5] * 20 + ["x"] * 40, {"problem_type": "regression"}, "row 21 of .* has 'x' in label"),
        ("a.jsonl", [["a", "a"], ["b"]] * 30, {}, "has the label a twice"),
        ("a.jsonl", [["a"], None, ["b"]] * 20, {}, "has no label in label"),
        ("a.jsonl", [["a"]] * ROWS, {}, "fewer than two classes"),
        ("a.csv", [f"{i % 2},{i % 3}" for i in range(ROWS)], {"label": ["u", "v"]}, r"row 3 of .* has \[0, 2\] in u v"),
    ],
)
def test_a_large_table_has_the_splits_targets_and_errors_of_a_small_one(tmp_path, name, labels, settings, error):
    path = write(tmp_path / name, labels, ",".join(settings.get("label", ["label"])))
    small, large = loaded(train_file=path, **settings)
    assert small == large
    assert isinstance(small, str) is bool(error)
    assert not error or re.search(error, small)


def test_the_training_labels_decide_which_rows_of_the_validation_data_are_incomplete(tmp_path):
    validation = write(tmp_path / "validation.csv", ["1", "NA", "1", "2"])
    for labels, expected in ((["a", "NA", "1", "2"], 4), (["1", "NA", "1", "2"], 3)):
        train = write(tmp_path / "train.csv", labels)
        files = {"train_file": (str(train),), "validation_file": (str(validation),)}

        def load(files=files):
            return read_parts(DataOptions(**files, skip_incomplete_rows=True), ["text"], ["label"])[1].num_rows

        assert in_both_ways(load) == [expected, expected]


# Data sets of `datasets`


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
    monkeypatch.setattr(rows, "IN_MEMORY", -1)
    folder = save(tmp_path / "saved", [0, 1] * 9, label=datasets.ClassLabel(names=["a", "b"]))
    first = read_saved(folder)["train"]
    assert content_of(read_saved(folder)["train"]) == content_of(first)
    described = tmp_path / "saved/dataset_info.json"
    described.write_text(described.read_text().replace('"b"', '"c"'))  # the numbers of the rows get other names
    assert content_of(read_saved(folder)["train"]) != content_of(first)
    save(tmp_path / "other", [1, 0] * 9)
    (tmp_path / "saved").rename(tmp_path / "before")
    (tmp_path / "other").rename(tmp_path / "saved")
    assert content_of(read_saved(folder)["train"]) != content_of(first)
