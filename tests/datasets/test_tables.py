import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from shared.config.options import Options
from shared.datasets import demo_texts, readers, tables
from shared.datasets.labels import Labels
from shared.datasets.rows import ROW_COLUMN, column_of, named, source_of, where
from shared.datasets.tables import load_tables, read_file, read_hub, read_saved, split_off
from shared.errors import UserError
from shared.plan.splits import share_of_each

ROWS = [{"text": "a, b", "label": 1}, {"text": 'says "no"\nand é', "label": 2}]


def load(text=("text",), label="label", problem_type=None, **flags):
    """The tables that these flags name."""
    return load_tables(
        Options(**{name: str(v) if isinstance(v, os.PathLike) else v for name, v in flags.items()}),
        text,
        [label],
        problem_type,
    )


def values(table, as_text=()):
    """The rows of a table as a recipe reads them: columns of a CSV file are numbers where they can be."""
    columns = {n: column_of(table, n, "", n in as_text).to_pylist() for n in table.column_names if n != ROW_COLUMN}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def refusal(path: Path) -> str:
    """The message with which reading `path` as --train_file is refused: one line that begins with flag and path."""
    with pytest.raises(UserError) as caught:
        read_file(str(path), "--train_file")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"--train_file {path}")
    return message.removeprefix(f"--train_file {path}")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may read everything, so that nothing is unreadable to it."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# Files that are right


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'text,label\n"a, b",1\n"says ""no""\nand é",2\n'),
        ("a.CSV", '\ufefftext,label\r\n"a, b",1\r\n"says ""no""\nand é",2\r\n'),
        ("a.tsv", 'text\tlabel\na, b\t1\n"says ""no""\nand é"\t2\n'),
        ("a.jsonl", "\n".join(map(json.dumps, ROWS))),
        ("a.json", "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"),
        ("array.json", json.dumps(ROWS, indent=2)),
        ("bom.json", "\ufeff" + json.dumps(ROWS)),
    ],
)
def test_the_same_rows_are_read_from_every_kind_of_text_file(tmp_path, name, content):
    table = read_file(str(write(tmp_path / name, content)), "--train_file")
    assert values(table) == ROWS
    assert source_of(table) == f"--train_file {tmp_path / name}"


def test_a_parquet_file_is_read(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    assert read_file(str(tmp_path / "a.parquet"), "--train_file").to_pylist() == ROWS


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_types_are_inferred_from_the_whole_file_and_not_from_its_beginning(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 64)
    rows = [{"label": 1}] * 100 + [{"label": 2.5}]
    lines = [json.dumps(row) for row in rows] if name.endswith("jsonl") else ["label"] + [str(r["label"]) for r in rows]
    table = read_file(str(write(tmp_path / name, "\n".join(lines))), "--train_file")
    assert values(table) == rows


# Files that are wrong


def test_a_missing_file_is_refused(tmp_path):
    assert refusal(tmp_path / "gone.csv") == ": no such file"


def test_a_folder_without_data_is_refused(tmp_path):
    for name in ("folder.csv", "folder"):
        (tmp_path / name).mkdir()
        assert refusal(tmp_path / name).startswith(" is a folder without a data file (.csv, ")


def test_an_unreadable_file_is_refused(tmp_path):
    path = write(tmp_path / "secret.csv", "text,label\na,1\n")
    path.chmod(0)
    with without_privileges():
        message = refusal(path)
    assert message == " cannot be read: Permission denied"


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.json", "a.jsonl", "a.parquet"])
@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path, name, content):
    assert refusal(write(tmp_path / name, content)) == " is empty"


@pytest.mark.parametrize(("name", "content"), [("a.csv", "text,label\n"), ("a.json", "[]")])
def test_a_file_without_rows_is_refused(tmp_path, name, content):
    assert refusal(write(tmp_path / name, content)) == " has no rows"


def test_a_parquet_file_without_rows_is_refused(tmp_path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == " has no rows"


def test_an_unknown_extension_is_refused_with_the_known_ones(tmp_path):
    path = write(tmp_path / "a.xlsx", "text")
    known = ".csv, .tsv, .json, .jsonl, .parquet; compressed with .gz, .bz2, .xz, .zst"
    assert refusal(path) == f": unknown kind of file, known are {known}"


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.json", "a.jsonl"])
def test_binary_garbage_is_refused(tmp_path, name):
    assert "is not text (byte 4 is zero)" in refusal(write(tmp_path / name, b"\x89PNG\x00\xff\xfe\x01"))


def test_what_is_no_parquet_file_is_refused(tmp_path):
    assert "is malformed: " in refusal(write(tmp_path / "a.parquet", b"text,label\na,1\n"))


def test_a_parquet_file_that_was_cut_off_is_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    assert "is malformed: " in refusal(write(tmp_path / "a.parquet", content[: len(content) // 2]))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_non_utf8_is_refused_with_byte_and_line(tmp_path, name):
    path = write(tmp_path / name, "text,label\nvéry\n".encode() + "café,1\n".encode("latin-1"))
    assert "is not UTF-8 (byte 20, line 3): convert it" in refusal(path)


def test_utf16_is_called_by_its_name(tmp_path):
    assert "is UTF-16" in refusal(write(tmp_path / "a.csv", "text,label\na,1\n".encode("utf-16")))


@given(prefix=st.text(max_size=20), block=st.integers(1, 9))
def test_the_first_byte_that_is_not_utf8_is_found_wherever_blocks_end(prefix, block):
    good = prefix.replace("\0", "").encode()
    line = good.count(b"\n") + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK_BYTES", block)
        readers._refuse_non_utf8(good, "x")
        with pytest.raises(UserError, match=rf"\(byte {len(good)}, line {line}\)"):
            readers._refuse_non_utf8(good + b"\xff" + good, "x")


def test_a_row_of_a_csv_file_with_too_many_fields_is_named(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\nab,1\nde,2,3\n")
    assert "is malformed: CSV parse error: Row #3: Expected 2 columns, got 3" in refusal(path)


def test_a_quotation_mark_that_is_never_closed_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", 'text,label\n"ab,1\n' + "de,2\n" * 50)
    assert "is malformed: " in refusal(path)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 64)
    assert "quotation mark" in refusal(path)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"text": "b" "label": 2}', "Expecting ',' delimiter at column 14"),
        ('{"text": "b', "Unterminated string starting at at column 10"),
        ("[1]", "not an object: "),
        ("1", "not an object: "),
    ],
)
def test_a_broken_line_of_json_is_named(tmp_path, bad, reason):
    path = write(tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n\n' + bad + '\n{"text": "c", "label": 1}\n')
    assert f" is malformed in line 3: {reason}" in refusal(path)


def test_json_rows_that_disagree_about_a_type_are_refused_with_the_column(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"text": "a", "label": 1}\n{"text": "b", "label": "x"}\n')
    assert refusal(path).endswith("Column(/label) changed from number to string")


@pytest.mark.parametrize(("content", "reason"), [('[{"a": 1}, 2]', "element 2 "), ('[{"a": 1}, {"a"', "line 1")])
def test_a_broken_json_array_is_refused(tmp_path, content, reason):
    assert reason in refusal(write(tmp_path / "a.json", content))


def test_two_columns_of_one_name_are_refused(tmp_path):
    assert "two columns of the name text" in refusal(write(tmp_path / "a.csv", "text,text\na,b\n"))


# Rows and columns


def test_a_missing_column_is_refused_with_those_there_are(tmp_path):
    table, _ = split_off(
        read_file(str(write(tmp_path / "a.csv", "sentence,target\na,1\nb,2\n")), "--train_file"), 50, 0
    )
    with pytest.raises(UserError, match=r"--label_column_name label: --train_file .*\(columns: sentence, target\)$"):
        column_of(table, "label", "--label_column_name")


def test_a_categorical_column_is_read_as_its_values():
    table = pa.table({"label": pa.array(["a", "b", "a"]).dictionary_encode()})
    assert column_of(table, "label", "--label_column_name").type == pa.string()


@given(rows=st.integers(2, 300), percentage=st.integers(1, 99), seed=st.integers(-5, 2**64))
def test_the_split_keeps_every_row_once_in_order_and_knows_its_number(rows, percentage, seed):
    table = named(pa.table({"x": np.arange(rows)}), "--train_file a.csv")
    train, validation = split_off(table, percentage, seed)
    assert sorted(train["x"].to_pylist() + validation["x"].to_pylist()) == list(range(rows))
    for part in (train, validation):
        numbers = part["x"].to_pylist()
        assert numbers == sorted(numbers)
        assert where(part, len(numbers) - 1) == f"row {numbers[-1] + 1} of --train_file a.csv"
    assert abs(validation.num_rows - rows * percentage / 100) <= 1


def test_the_split_is_a_function_of_the_seed_and_of_nothing_else():
    table = pa.table({"x": np.arange(20)})
    assert split_off(table, 25, 0)[1]["x"].to_pylist() == [4, 8, 13, 14, 17]
    assert split_off(table, 25, 1)[1]["x"].to_pylist() != [4, 8, 13, 14, 17]


@given(st.lists(st.integers(0, 5), min_size=2, max_size=200), st.integers(1, 99), st.integers(0, 99))
def test_each_label_is_split_and_keeps_a_row_to_train_on(labels, percentage, seed):
    table, targets = pa.table({"x": labels}), np.array(labels)
    if len(set(labels)) == len(labels):
        with pytest.raises(
            UserError, match="has one row of each label, so none can be held out: give --validation_file"
        ):
            split_off(table, percentage, seed, targets)
        return
    train, validation = split_off(table, percentage, seed, targets)
    assert set(train["x"].to_pylist()) == set(labels)
    assert validation.num_rows > 0
    held_out, counts = (np.bincount(part, minlength=6) for part in (validation["x"].to_numpy(), targets))
    assert (np.abs(held_out - counts * percentage / 100) <= 1).all()
    assert split_off(table, percentage, seed, targets)[1]["x"].to_pylist() == validation["x"].to_pylist()


@given(st.lists(st.sets(st.integers(0, 4)), min_size=2, max_size=60), st.integers(1, 99), st.integers(0, 9))
def test_of_several_labels_none_loses_its_last_row(rows, percentage, seed):
    targets = np.array([[label in row for label in range(5)] for row in rows], np.float32)
    held_out = share_of_each(targets, percentage, seed)
    assert (targets[~held_out].any(0) == targets.any(0)).all()
    assert held_out.sum() <= len(rows) * percentage / 100
    assert np.array_equal(share_of_each(targets, percentage, seed), held_out)


def test_numbers_to_be_predicted_are_split_as_rows_are():
    table = pa.table({"x": np.arange(20)})
    assert split_off(table, 25, 0, np.arange(20.0))[1] == split_off(table, 25, 0)[1]


def test_one_row_cannot_be_split():
    with pytest.raises(UserError, match="one row"):
        split_off(pa.table({"x": [1]}), 10, 0)


# Which source


def test_without_flags_the_embedded_docstrings_are_loaded(monkeypatch):
    parts = (pa.table({"text": ["a"], "label": ["x"], "file": ["f"]}), pa.table({"text": ["b"], "label": ["y"]}))
    monkeypatch.setattr(demo_texts, "load", lambda: parts)
    train, validation = load()
    assert (train["text"].to_pylist(), validation["text"].to_pylist()) == (["a"], ["b"])
    assert where(validation, 0) == "row 1 of the embedded docstrings"


def test_two_files_are_two_parts(tmp_path):
    train_file, validation_file = write(tmp_path / "a.csv", "x\n1\n"), write(tmp_path / "b.jsonl", '{"x": 2}\n')
    train, validation = load(train_file=train_file, validation_file=validation_file)
    assert (values(train), values(validation)) == ([{"x": 1}], [{"x": 2}])
    assert where(validation, 0) == f"row 1 of --validation_file {validation_file}"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_file_alone_is_split_and_one_process_says_so(tmp_path, monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    path = write(tmp_path / "a.csv", "x\n" + "\n".join(map(str, range(40))))
    train, validation = load(train_file=str(path), seed=3)
    assert (train.num_rows, validation.num_rows) == (36, 4)
    said = f"--train_file {path} has no validation part: 4 of its rows (10 %, chosen by --seed 3) are kept for it\n"
    assert capsys.readouterr().err == (said if rank == "0" else "")


# Folders of save_to_disk and the Hub, which need the package datasets


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("saved")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = {"text": [f"text {i}" for i in range(10)], "label": [i % 2 for i in range(10)]}
    data = datasets.Dataset.from_dict(rows, features=features)
    data.select([3, 1, 2]).save_to_disk(folder / "one")
    datasets.DatasetDict(train=data, validation=data.select([7, 5])).save_to_disk(folder / "dict")
    datasets.DatasetDict(test=data).save_to_disk(folder / "test_only")
    return folder


def test_a_saved_dataset_is_read_in_its_order_with_its_label_names(saved):
    table = read_saved(str(saved / "one"))["train"]
    assert table["text"].to_pylist() == ["text 3", "text 1", "text 2"]
    assert b'"names": ["no", "yes"]' in table.schema.metadata[b"huggingface"]
    assert source_of(table) == f"--dataset_name {saved / 'one'} (split train)"


def test_a_saved_dictionary_gives_its_train_and_validation_split(saved):
    train, validation = load(dataset_name=str(saved / "dict"))
    assert train.num_rows == 10
    assert validation["text"].to_pylist() == ["text 7", "text 5"]


def test_a_saved_dataset_without_validation_is_split(saved):
    train, validation = load(dataset_name=str(saved / "one"))
    assert (train.num_rows, validation.num_rows) == (2, 1)


def test_the_test_split_validates_where_there_is_no_validation_split_and_that_is_said(saved, tmp_path, capfd):
    datasets = pytest.importorskip("datasets")
    data = datasets.load_from_disk(saved / "dict")["train"]
    parts = {"train": data, "test": data.select([4, 9, 6])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "two")
    datasets.DatasetDict(parts | {"validation": data.select([7])}).save_to_disk(tmp_path / "three")
    train, validation = load(dataset_name=str(tmp_path / "two"))
    assert train.num_rows == 10
    assert validation["text"].to_pylist() == ["text 4", "text 9", "text 6"]
    assert f"{tmp_path / 'two'} has no validation split: its test split serves as one" in capfd.readouterr().err
    _, validation = load(dataset_name=str(tmp_path / "three"))
    assert validation["text"].to_pylist() == ["text 7"]
    assert "test split" not in capfd.readouterr().err


def test_a_dataset_without_a_train_split_is_refused(saved):
    with pytest.raises(UserError, match=r"no train split \(splits: test\)"):
        load(dataset_name=str(saved / "test_only"))


def test_a_folder_that_save_to_disk_did_not_write_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--dataset_name .* not one that datasets' save_to_disk wrote"):
        load(dataset_name=str(tmp_path))


def test_a_saved_dataset_that_was_cut_off_is_refused(saved, tmp_path):
    for path in (saved / "one").iterdir():
        content = path.read_bytes()
        write(tmp_path / path.name, content[:40] if path.suffix == ".arrow" else content)
    with pytest.raises(UserError, match="save_to_disk"):
        read_saved(str(tmp_path))


def test_a_config_name_for_a_folder_is_refused(saved):
    with pytest.raises(UserError, match="--dataset_config_name mrpc"):
        load(dataset_name=str(saved / "one"), dataset_config_name="mrpc")


@pytest.mark.parametrize("name", ["./gone", "/gone/folder", "~/gone", "out/some/folder"])
def test_a_missing_folder_is_no_hub_name(name):
    with pytest.raises(UserError, match=f"--dataset_name {name}: no such folder"):
        read_hub(name, None)


def test_a_file_as_dataset_name_is_refused(tmp_path):
    with pytest.raises(UserError, match="give it as --train_file"):
        read_hub(str(write(tmp_path / "a.csv", "x\n1\n")), None)


@pytest.fixture
def no_network(monkeypatch) -> None:
    """The Hub is at a closed port, and a call of its client fails the test."""
    datasets = pytest.importorskip("datasets")

    def call(*_args, **_kwargs):
        raise AssertionError("asked the Hub, which retries for 24 s")

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(datasets, "load_dataset", call)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_the_embedded_data_are_offered():
    with pytest.raises(UserError, match=r"--dataset_name a/b --dataset_config_name c is .*leave out --dataset_name"):
        read_hub("a/b", "c")


@pytest.mark.usefixtures("no_network")
def test_a_dataset_that_was_loaded_before_needs_no_network(monkeypatch, tmp_path):
    import datasets

    class Tiny(datasets.GeneratorBasedBuilder):
        def _info(self):
            return datasets.DatasetInfo(features=datasets.Features({"text": datasets.Value("string")}))

        def _split_generators(self, _dl_manager):
            return [datasets.SplitGenerator("train", {"count": 4}), datasets.SplitGenerator("validation", {"count": 2})]

        def _generate_examples(self, count):
            yield from ((i, {"text": f"text {i}"}) for i in range(count))

    Tiny(cache_dir=str(tmp_path), repo_id="someone/tiny", dataset_name="tiny", hash="abc").download_and_prepare()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    train, validation = load(dataset_name="someone/tiny")
    assert (train.num_rows, validation.num_rows) == (4, 2)
    assert where(train, 1) == "row 2 of --dataset_name someone/tiny (split train)"


def test_without_the_package_datasets_a_hub_name_is_refused(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match="--dataset_name a/b needs the package datasets: pip install datasets"):
        read_hub("a/b", None)


# What a CSV file has written


def labeled(tmp_path, train, validation=None, name="train.csv", **flags):
    """Labels of a file with these texts as labels, and the targets of both parts."""
    separator = "\t" if name.endswith("tsv") else ","
    files = {"train_file": (name, train), "validation_file": (f"valid-{name}", validation or train)}
    for flag, (file, labels) in files.items():
        lines = [f"text{separator}label", *(f"row {i}{separator}{label}" for i, label in enumerate(labels))]
        flags[flag] = write(tmp_path / file, "\n".join(lines) + "\n")
    tables = load(**flags)
    found = Labels.from_table(tables[0], "label", flags.get("problem_type"))
    return found, [found.encode(table).tolist() for table in tables]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
@pytest.mark.parametrize(
    ("written", "names", "ids"),
    [
        (["1", "01", "1", "2"], ("01", "1", "2"), [1, 0, 1, 2]),
        (["00123", "9", "00123"], ("9", "00123"), [1, 0, 1]),
        (["10", "9", "0", " 9 "], ("0", "9", "10"), [2, 1, 0, 1]),
        (["+1", "1", "-1"], ("-1", "+1", "1"), [1, 2, 0]),
        (["NA", "DE", "null", "DE"], ("DE", "NA", "null"), [1, 0, 2, 0]),
        (["True", "False", "True"], ("False", "True"), [1, 0, 1]),
        (["2020-01-01", "2021-01-01"], ("2020-01-01", "2021-01-01"), [0, 1]),
        (["1.0", "1.5", "beta", "1.50"], ("1.0", "1.5", "1.50", "beta"), [0, 1, 3, 2]),
        (["0x10", "16", "16"], ("0x10", "16"), [0, 1, 1]),
        (["12345678901234567890", "12345678901234567891"], ("12345678901234567890", "12345678901234567891"), [0, 1]),
    ],
)
def test_labels_of_a_csv_file_are_classes_as_they_are_written(tmp_path, name, written, names, ids):
    labels, targets = labeled(tmp_path, written, name=name)
    assert (labels.kind, labels.names) == ("classification", names)
    assert targets == [ids, ids]


@pytest.mark.parametrize(
    ("train", "validation", "problem_type", "targets"),
    [
        (["0.5", "1", ""], None, None, "has no label"),
        (["0.5", "1", "NA", "NA"], None, None, r"row 3 of .* has no label in label \(2 such rows\)"),
        (["0.5", "1e1", "-.25"], ["1", "007"], None, [[0.5, 10, -0.25], [1, 7]]),
        (["1", "02", "3"], ["4", "5"], "regression", [[1, 2, 3], [4, 5]]),
        (["0.5", "1.5"], ["0.5", "one"], None, r"row 2 of --validation_file .* has 'one' in label, which is no number"),
        (["1", "2", "x"], None, "regression", r"row 3 of --train_file .* has 'x' in label, which is no number"),
        (["0.5", "inf"], None, None, "not finite"),
    ],
)
def test_numbers_of_a_csv_file_are_predicted_where_one_is_no_integer_or_where_it_is_asked_for(
    tmp_path, train, validation, problem_type, targets
):
    if isinstance(targets, str):
        with pytest.raises(UserError, match=targets):
            labeled(tmp_path, train, validation, problem_type=problem_type)
        return
    labels, found = labeled(tmp_path, train, validation, problem_type=problem_type)
    assert (labels.kind, found) == ("regression", targets)


def test_labels_of_another_kind_of_file_are_found_in_a_csv_file_as_they_are_written(tmp_path):
    train = write(tmp_path / "a.jsonl", '{"text": "a", "label": "1.0"}\n{"text": "b", "label": "2"}\n')
    valid = write(tmp_path / "b.csv", "text,label\na,2\nb,1.0\n")
    tables = load(train_file=train, validation_file=valid)
    assert Labels.from_table(tables[0], "label").encode(tables[1]).tolist() == [1, 0]
    write(train, '{"text": "a", "label": 0}\n{"text": "b", "label": 1}\n')
    write(valid, "text,label\na,1\nb,0\n")
    tables = load(train_file=train, validation_file=valid)
    assert Labels.from_table(tables[0], "label").encode(tables[1]).tolist() == [1, 0]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
@pytest.mark.parametrize(
    "texts", [["1", "02"], ["2020-01-01", "2020-01-02 10:00:00"], ["NA", "null"], ["true", "1.50"]]
)
def test_a_text_column_is_the_text_as_it_is_written(tmp_path, name, texts):
    separator = "\t" if name.endswith("tsv") else ","
    lines = ["text" + separator + "label", *(f"{text}{separator}x" for text in texts)]
    if name.endswith("jsonl"):
        lines = [json.dumps({"text": text, "label": "x"}) for text in texts]
    table = read_file(str(write(tmp_path / name, "\n".join(lines) + "\n")), "--train_file")
    assert column_of(table, "text", "--text_column_names", as_text=True).to_pylist() == texts
    assert table.column_names == ["text", "label"]


STRAY = ["text\tlabel", *(f"row {i}\t{i % 2}" for i in range(200))]


@pytest.mark.parametrize(
    ("first", "last", "name", "said"),
    [
        ('"row', '"row', "a.tsv", "in line 20 and closed in the middle of a field in line 93"),
        ('"row', 'row"', "a.tsv", "in line 20 and closed in the middle of a field in line 93"),
        ('"row', '"row', "a.csv", "in line 20 and closed in the middle of a field in line 93"),
    ],
)
def test_quotation_marks_that_swallow_rows_are_refused_with_their_lines(tmp_path, first, last, name, said):
    lines = [*STRAY]
    lines[19], lines[92] = lines[19].replace("row", first), lines[92].replace("row", last)
    content = "\n".join(lines).replace("\t", "\t" if name.endswith("tsv") else ",") + "\n"
    assert said in refusal(write(tmp_path / name, content))


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_marks_that_could_be_right_are_refused_over_tabs_and_said_otherwise(tmp_path, capsys, name):
    lines = [*STRAY]
    lines[19], lines[92] = lines[19].replace("row", '"row'), lines[92].replace("row 91", 'row 91"')
    separator = "\t" if name.endswith("tsv") else ","
    path = write(tmp_path / name, "\n".join(lines).replace("\t", separator) + "\n")
    if name == "a.tsv":
        assert "in line 20 and closed behind other fields in line 93" in refusal(path)
        return
    assert read_file(str(path), "--train_file").num_rows == 127
    assert "field that begins in line 20 goes on to line 93, over lines that look like rows" in capsys.readouterr().err
    write(path, 'text,label\n"a poem\nof three lines\nwithout them",1\n"say ""hi"", twice\nor so",2\n')
    assert read_file(str(path), "--train_file").num_rows == 2
    assert not capsys.readouterr().err


# Which columns


@pytest.mark.parametrize(
    ("text", "label", "said"),
    [
        (
            ("text", "label"),
            "label",
            "--text_column_names text label and --label_column_name label: the model would",
        ),
        (("text", "text"), "label", "--text_column_names text text: a pair is two different columns"),
    ],
)
def test_columns_that_cannot_go_together_are_refused(tmp_path, text, label, said):
    path = write(tmp_path / "a.csv", "text,label\na,1\nb,2\n")
    with pytest.raises(UserError, match=said):
        load(text, label, train_file=path)


# Which splits


def saved_splits(folder, **splits):
    """A save_to_disk folder with so many rows in each split, or with these labels."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    parts = {}
    for name, labels in splits.items():
        ids = [i % 2 for i in range(labels)] if isinstance(labels, int) else labels
        rows = {"text": [f"{name} {i}" for i in range(len(ids))], "label": ids}
        parts[name] = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(parts).save_to_disk(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["valid", "dev", "val", "eval", "Validation", "development", "dev_matched"])
def test_a_validation_split_is_found_by_its_usual_names_and_said(tmp_path, capfd, name):
    folder = saved_splits(tmp_path / "a", Train=10, test=3, **{name: 2})
    train, validation = load(dataset_name=folder)
    assert train["text"][0].as_py() == "Train 0"
    assert validation["text"].to_pylist() == [f"{name} 0", f"{name} 1"]
    assert f"--dataset_name {folder}: its split {name} is the validation data" in capfd.readouterr().err


def test_splits_can_be_named_and_those_there_are_are_said(tmp_path, capfd):
    folder = saved_splits(tmp_path / "a", train=10, extra=4, held=3)
    train, validation = load(dataset_name=folder, train_split_name="extra", validation_split_name="held")
    assert (source_of(train), validation.num_rows) == (f"--dataset_name {folder} (split extra)", 3)
    assert load(dataset_name=folder)[1].num_rows == 1
    assert "(splits: train, extra, held): --validation_split_name names one" in capfd.readouterr().err
    for flags, said in (
        ({"train_split_name": "trian"}, r"--train_split_name trian: .* no such split \(splits: train, extra, held\)"),
        ({"validation_split_name": "train"}, "--validation_split_name train is the split that is trained on"),
    ):
        with pytest.raises(UserError, match=said):
            load(dataset_name=folder, **flags)


def test_a_test_split_without_labels_is_not_validated_on(tmp_path, capfd):
    folder = saved_splits(tmp_path / "a", train=20, test=[-1] * 5)
    train, validation = load(dataset_name=folder)
    assert (train.num_rows, validation.num_rows) == (18, 2)
    said = capfd.readouterr().err
    assert "its split test has no labels, so nothing can be validated on it" in said
    assert "2 of its rows (10 %, chosen by --seed 0) are kept for it" in said


def test_a_split_without_rows_is_refused_with_those_that_have_some(tmp_path):
    folder = saved_splits(tmp_path / "a", train=4, validation=0)
    with pytest.raises(UserError, match=r"its split validation has no rows \(train: 4, validation: 0\): leave it out"):
        load(dataset_name=folder)
    assert load(dataset_name=saved_splits(tmp_path / "b", train=4, validation=2, extra=0))[1].num_rows == 2


# Which rows


def test_rows_with_gaps_are_left_out_on_request_and_counted(tmp_path, capsys):
    path = write(tmp_path / "a.csv", "text,label\na,1\n ,2\nb,NA\nc,2\nNA,1\n,\n")
    train, _ = load(train_file=path, validation_file=path, skip_incomplete_rows=True)
    assert train["text"].to_pylist() == ["a", "c", "NA"]
    assert Labels.from_table(train, "label").encode(train).tolist() == [0, 1, 0]
    assert where(train, 1) == f"row 4 of --train_file {path}"
    said = f"3 of 6 rows of --train_file {path} are left out (nothing in text: 2, label: 2)\n"
    assert said in capsys.readouterr().err
    folder = saved_splits(tmp_path / "saved", train=[0, -1, 1], validation=2)
    assert load(dataset_name=folder, skip_incomplete_rows=True)[0]["text"].to_pylist() == ["train 0", "train 2"]
    rows = pa.table({"text": ["a", None, "c"], "label": [0.5, 1.0, float("nan")], "x": [["a"], None, []]})
    pq.write_table(rows, tmp_path / "a.parquet")
    parquet = {"train_file": tmp_path / "a.parquet", "validation_file": tmp_path / "a.parquet"}
    assert load(**parquet, skip_incomplete_rows=True)[0].num_rows == 1
    assert load(("x",), "text", **parquet, skip_incomplete_rows=True)[0].num_rows == 2
    write(path, "text,label\n,1\n,2\n")
    with pytest.raises(UserError, match=r"--skip_incomplete_rows: 2 of 2 rows .* so none is left"):
        load(train_file=path, validation_file=path, skip_incomplete_rows=True)


def test_a_limit_leaves_rows_that_the_seed_chooses_of_what_is_left_to_train_on(tmp_path, capsys):
    path = write(tmp_path / "a.csv", "text,label\n" + "".join(f"text {i},{i // 50}\n" for i in range(100)))
    full = load(train_file=path)
    parts = tables.limited(full, Options(max_train_samples=30, max_eval_samples=4))
    for part, whole, count in zip(parts, full, (30, 4), strict=True):
        chosen = part["text"].to_pylist()
        assert (len(chosen), len({*chosen} - {*whole["text"].to_pylist()})) == (count, 0)
        assert [where(part, i) for i in range(3)] == [
            f"row {int(t[5:]) + 1} of --train_file {path}" for t in chosen[:3]
        ]
    assert {*parts[0]["label"].to_pylist()} == {"0", "1"} or {*parts[0]["label"].to_pylist()} == {0, 1}
    assert (
        tables.subset(10, 3, 0, "").tolist()
        == tables.subset(10, 3, 0, "").tolist()
        != tables.subset(10, 3, 1, "").tolist()
    )
    assert tables.limited(full, Options(max_train_samples=90)) == full
    assert tables.limited(full, Options(max_train_samples=91)) == full
    assert "--max_train_samples 91: there are only 90 rows, and all of them are taken" in capsys.readouterr().err
