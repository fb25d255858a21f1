"""Large files become memory-mapped tables, block by block: the same rows, splits, labels and errors as in memory."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from table_files import in_both_ways, loaded

from shared.cache.prepared import array_writer, read_array
from shared.datasets import arrow_files, label_cells, rows
from shared.datasets.rows import content_of, source_of, where
from shared.datasets.tables import load_tables, read_file, skip_incomplete
from shared.options.data_options import DataOptions

pytestmark = pytest.mark.usefixtures("own_cache")

ROWS = 60


def write(path, labels, label="label", **_):
    """Write a file of numbered texts with these labels, in a CSV file in one or several columns."""
    columns = label if isinstance(label, str) else ",".join(label)
    texts = [f"text {i}" for i in range(len(labels))]
    if path.suffix == ".csv":
        path.write_text(
            f"text,{columns}\n" + "".join(f"{row},{label}\n" for row, label in zip(texts, labels, strict=True))
        )
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts, "label": labels}), path, row_group_size=10)
    else:
        lines = [json.dumps({"text": text, "label": label}) for text, label in zip(texts, labels, strict=True)]
        path.write_text("\n".join(lines))
    return path


# Reading


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text,label\n"a, b",1\n"says ""no""\nand é",2\n' + "more,3\n" * 20),
        ("bom.tsv", "\ufefftext\tlabel\r\n" + "é\t01\r\n" * 30),
        ("a.jsonl", "\n".join(json.dumps({"text": f"é {i}", "label": i if i < 30 else i + 0.5}) for i in range(50))),
        ("a.json", json.dumps([{"text": f"é {i}", "label": [i] * (i % 3)} for i in range(50)], indent=1)),
        ("late.jsonl", "\n".join(json.dumps({"text": "2020-01-01" if i < 9 else f"é {i}"}) for i in range(20))),
        ("more.jsonl", "\n".join(json.dumps({"text": f"é {i}"} | ({"x": i} if i > 8 else {})) for i in range(20))),
    ],
)
def test_a_file_of_many_blocks_has_the_rows_and_types_of_one_block(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)

    def read():
        table = read_file(str(path), "--train_file")
        return table.to_pylist(), table.schema.types, source_of(table), rows.reading_in(table, "text")

    small, large = in_both_ways(read)
    assert small == large
    assert small[0]


def test_values_that_no_type_fits_are_refused_across_blocks(tmp_path):
    path = write(tmp_path / "a.jsonl", [1, 2, 3, "x", "y", "z"])
    _, large = in_both_ways(lambda: read_file(str(path), "--train_file"))
    assert large.startswith(f"--train_file {path}")
    assert "label" in large


def test_a_changed_file_is_converted_again_and_an_unchanged_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(arrow_files, "IN_MEMORY", -1)
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
    monkeypatch.setattr(arrow_files, "_write", lambda *_: pytest.fail("converted again"))
    assert read_file(str(path), "--train_file").equals(changed)


# Splits and labels


RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("name", "labels", "settings"),
    [
        ("a.csv", RANDOM.choice(["a", "b", "c d"], ROWS).tolist(), {}),
        ("a.csv", RANDOM.choice(["01", "1", "2"], ROWS).tolist(), {"max_train_samples": 9, "max_eval_samples": 3}),
        ("a.csv", RANDOM.random(ROWS).round(2).tolist(), {}),
        ("a.csv", RANDOM.integers(0, 5, ROWS).tolist(), {"problem_type": "regression"}),
        ("a.csv", [0.5] * 20 + [""] * 20 + [1.5] * 20, {"skip_incomplete_rows": True}),
        ("a.csv", RANDOM.choice(["x;y", "y", "", "x;z"], ROWS).tolist(), {"delimiter": ";"}),
        ("a.jsonl", [["a"], [], ["b", "a"], ["c"]] * 15, {}),
        ("a.jsonl", [[0, 1], [1, 0], [1, 1]] * 20, {}),
        ("a.parquet", [True, False] * 30, {}),
        ("a.csv", [f"{i % 2},{int(i % 3 == 0)}" for i in range(ROWS)], {"label": ["u", "v"]}),
    ],
)
def test_a_large_table_has_the_splits_and_targets_of_a_small_one(tmp_path, name, labels, settings):
    small, large = loaded(
        train_file=write(tmp_path / name, labels, ",".join(settings.get("label", ["label"]))), **settings
    )
    assert small == large
    assert not isinstance(small, str)


@pytest.mark.parametrize(
    ("name", "labels", "settings", "expected"),
    [
        ("a.csv", ["a"] * 20 + [""] * 40, {}, "row 21 of .* has no label in label"),
        ("a.csv", ["a"] * ROWS, {}, "has fewer than two classes"),
        ("a.csv", [f"a{i}" for i in range(ROWS)], {}, "has one row of each label"),
        ("a.csv", [f"a{i // 2}" for i in range(240)], {}, "has 120 different values in 216 rows, too many"),
        ("a.csv", [1e300] * 20 + [2.5] * 40, {}, "not finite in float32"),
        ("a.csv", [0.5] * 20 + ["x"] * 40, {"problem_type": "regression"}, "row 21 of .* has 'x' in label"),
        ("a.jsonl", [["a", "a"], ["b"]] * 30, {}, "has the label a twice"),
        ("a.jsonl", [["a"], None, ["b"]] * 20, {}, "has no label in label"),
        ("a.jsonl", [["a"]] * ROWS, {}, "fewer than two classes"),
        ("a.csv", [f"{i % 2},{i % 3}" for i in range(ROWS)], {"label": ["u", "v"]}, "row 3 of .* has [0, 2] in u v"),
    ],
)
def test_errors_about_labels_of_a_large_table_are_those_of_a_small_one(tmp_path, name, labels, settings, expected):
    small, large = loaded(
        train_file=write(tmp_path / name, labels, ",".join(settings.get("label", ["label"]))), **settings
    )
    assert small == large
    first, _, second = expected.partition(".*")
    assert first in small
    assert second in small


def test_too_many_different_labels_end_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr(label_cells, "MOST_DISTINCT", 50)
    _, large = loaded(train_file=write(tmp_path / "a.csv", [f"a{i}" for i in range(ROWS)]))
    assert "has more than 50 different values in label, too many for classes" in large


def test_rows_are_skipped_in_blocks(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "a,1\n ,2\n" * 10)

    def skip():
        table = skip_incomplete(read_file(str(path), "--train_file"), ["text"])
        return table["text"].to_pylist(), where(table, 1)

    small, large = in_both_ways(skip)
    assert small == large == (["a"] * 10, f"row 3 of --train_file {path}")
    assert capsys.readouterr().err.count("10 of 20 rows of") == 2


def test_the_training_labels_decide_which_rows_of_the_validation_data_are_incomplete(tmp_path):
    validation = write(tmp_path / "validation.csv", ["1", "NA", "1", "2"])
    for labels, expected in ((["a", "NA", "1", "2"], 4), (["1", "NA", "1", "2"], 3)):
        train = write(tmp_path / "train.csv", labels)
        files = {"train_file": (str(train),), "validation_file": (str(validation),)}

        def load(files=files):
            return load_tables(DataOptions(**files, skip_incomplete_rows=True), ["text"], ["label"])[1].num_rows

        assert in_both_ways(load) == [expected, expected]


def test_an_array_written_in_blocks_has_the_bytes_of_one_that_is_saved_whole(tmp_path):
    for shape in ((0,), (7,), (5, 3)):
        array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        np.save(tmp_path / "whole.npy", array)
        with array_writer(tmp_path / "blocks.npy", np.float32, *shape[1:]) as append:
            for start in range(0, len(array), 2):
                append(array[start : start + 2])
        assert (tmp_path / "blocks.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
        assert read_array(tmp_path / "blocks.npy").tolist() == array.tolist()
