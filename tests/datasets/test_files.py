"""Lists of files, patterns, folders and compressed files are read as rows or documents; bad ones are refused."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from large_data import COMPRESS
from runs import refusal
from table_files import class_labels, table_of

from shared.config import options
from shared.datasets.rows import column_of, content_of, source_of, typed_column_of, where
from shared.datasets.tables import read_file, read_parts, split
from shared.options.data_options import DataOptions
from shared.tagging.tagged_texts import read_files
from shared.text.corpus import load_documents, of_files

pytestmark = pytest.mark.usefixtures("own_cache")

KINDS = {
    "csv": lambda rows: "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows),
    "tsv": lambda rows: "text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows),
    "jsonl": lambda rows: "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows),
    "json": lambda rows: json.dumps([{"text": text, "label": label} for text, label in rows]),
}
ROWS = [(f"text, {i}" if i % 3 else f"row {i} é", i % 2) for i in range(9)]


def write(path, rows):
    """Write the rows as a file of the kind given by its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind, *compression = path.suffixes
    if kind == ".parquet":
        pq.write_table(pa.table({"text": [text for text, _ in rows], "label": [label for _, label in rows]}), path)
        return str(path)
    content = KINDS[kind[1:]](rows).encode()
    path.write_bytes(COMPRESS[compression[0][1:]](content) if compression else content)
    return str(path)


def texts_of(documents):
    return documents["text"].to_pylist()


def refusals(given):
    """The errors of reading files as rows and as documents, which are read to their end."""
    yield refusal(read_file, given, "--train_file")
    yield refusal(lambda: texts_of(of_files(given, "--train_file", "text")))


@pytest.mark.parametrize("compression", list(COMPRESS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_compressed_file_is_read_like_any_other(tmp_path, kind, compression):
    path = write(tmp_path / f"a.{kind}.{compression}", ROWS)
    table = read_file(path, "--train_file")
    assert column_of(table, "text", "").to_pylist() == [text for text, _ in ROWS]
    assert typed_column_of(table, "label").to_pylist() == [label for _, label in ROWS]
    assert texts_of(of_files([path], "--train_file", "text")) == [text for text, _ in ROWS]


@pytest.mark.parametrize("compression", list(COMPRESS))
def test_a_compressed_file_is_read_to_the_end_of_its_parts_and_refused_if_it_is_cut_off(tmp_path, compression):
    compress = COMPRESS[compression]
    (tmp_path / f"a.txt.{compression}").write_bytes(compress(b"one\ntwo\n") + compress(b"three\n"))
    assert texts_of(of_files([str(tmp_path)], "--train_file", "text")) == ["one", "two", "three"]
    path = tmp_path / f"a.csv.{compression}"
    whole = compress(KINDS["csv"](ROWS * 100).encode())
    for content in (whole[: len(whole) // 2], b"text,label\na,1\n"):
        path.write_bytes(content)
        for message in refusals([str(path)]):
            assert message.startswith(f"--train_file {path}: ")


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "jsonl.zst", "parquet"])
def test_several_files_are_read_in_the_order_of_their_names_however_they_are_given(tmp_path, kind):
    names = [write(tmp_path / f"data/part-{i}.{kind}", ROWS[3 * i : 3 * i + 3]) for i in range(3)]
    ends = kind.partition(".")[0]
    (tmp_path / "data/.hidden.csv").write_text("a")
    (tmp_path / "data/_SUCCESS").write_text("")
    for given in (names[::-1], [str(tmp_path / "data")], [f"{tmp_path}/data/*.{ends}*"], [f"{tmp_path}/**/part*"]):
        table = read_file(given, "--train_file")
        assert column_of(table, "text", "").to_pylist() == [text for text, _ in ROWS]
        assert where(table, 4) == f"row 2 of --train_file {names[1]}"
        assert source_of(table) == f"--train_file {' '.join(given)}"
        documents = of_files(given, "--train_file", "text")
        assert texts_of(documents) == [text for text, _ in ROWS]
        digest = content_of(documents)
    (tmp_path / "data").rename(tmp_path / "moved")
    assert content_of(of_files([str(tmp_path / "moved")], "--train_file", "text")) == digest


def test_after_a_split_a_row_is_named_by_its_file_and_number(tmp_path):
    names = [write(tmp_path / f"{i}.csv", ROWS) for i in range(3)]
    config = DataOptions(train_file=tuple(names))
    train, validation = split(read_parts(config, ["text"], ["label"]), config)
    assert (train.num_rows, validation.num_rows) == (24, 3)
    found = [where(part, row) for part in (train, validation) for row in range(part.num_rows)]
    assert sorted(found) == sorted(f"row {i + 1} of --train_file {name}" for name in names for i in range(9))


def test_labels_have_the_same_meaning_in_all_files(tmp_path):
    names = tuple(write(tmp_path / f"{i}.csv", [("a", label), ("b", "2")]) for i, label in enumerate(("1", "01")))
    train, _ = read_parts(DataOptions(train_file=names, validation_file=names), ["text"], ["label"])
    assert column_of(train, "label", "").to_pylist() == ["1", "2", "01", "2"]
    write(tmp_path / "1.csv", [("a", "0.5"), ("b", "2")])
    train, _ = read_parts(DataOptions(train_file=names, validation_file=names), ["text"], ["label"])
    assert column_of(train, "label", "").to_pylist() == [1, 2, 0.5, 2]


def test_files_with_different_columns_or_types_are_refused_with_their_names(tmp_path):
    one, other = tmp_path / "a.csv", tmp_path / "b.csv"
    write(one, ROWS)
    other.write_text("words,label,id\na,1,2\n")
    message = refusal(read_file, [str(one), str(other)], "--train_file")
    assert message == (
        f"--train_file {other} has other columns than --train_file {one}: only one of them has id, text, words"
    )
    other.write_text("label,text\n1,a\n")  # the order of the columns may differ
    assert read_file([str(one), str(other)], "--train_file").num_rows == 10
    write(tmp_path / "a.jsonl", [("text", 2**53 + 1)])
    differ = "Field label has incompatible types"
    lossy = "a.jsonl has other types than other rows: .*: Integer value 9007199254740993"
    for label, found in ((0.5, lossy), ("x", f"b.jsonl: .*{differ}")):
        write(tmp_path / "b.jsonl", [("text", label)])
        assert re.match(f"--train_file {tmp_path}/{found}", refusal(read_file, [f"{tmp_path}/*.jsonl"], "--train_file"))
    assert differ in refusal(read_file, [str(one), f"{tmp_path}/a.jsonl"], "--train_file")
    for name, names in (("a", ["no", "yes"]), ("b", ["no", "so-so", "yes"])):
        pq.write_table(class_labels(table_of([0, 1]), names), tmp_path / f"{name}.parquet")
    message = refusal(read_file, [f"{tmp_path}/*.parquet"], "--train_file")
    assert f"{tmp_path}/b.parquet has another ClassLabel in label than --train_file {tmp_path}/a.parquet" in message


def test_flags_that_name_no_file_or_a_file_twice_are_refused(tmp_path):
    path = write(tmp_path / "data/a.csv", ROWS)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved/dataset_info.json").write_text("{}")
    for name in ("several/a.csv", "several/b.jsonl", "twice/a.csv", "twice/a.csv.gz"):
        write(tmp_path / name, ROWS)
    for given, expected in (
        ([f"{tmp_path}/*.csv"], f"--train_file {tmp_path}/*.csv: no such file (.csv, "),
        ([path, f"{tmp_path}/data"], f"--train_file {path} and {path} are the same data: name each file once"),
        ([f"{tmp_path}/twice"], "are the same data: name each file once"),
        ([str(tmp_path)], f"--train_file {tmp_path}: no such file (.csv"),
        ([f"{tmp_path}/b.csv"], f"--train_file {tmp_path}/b.csv: no such file"),
        ([f"{tmp_path}/several"], "files of several kinds (.csv, .jsonl): select one, such as '*.csv'"),
        ([f"{tmp_path}/saved"], "use it as --dataset_name"),
    ):
        assert expected in refusal(read_file, given, "--train_file")
    assert "--train_file [] names no file" in refusal(options.check, DataOptions(train_file=[]))  # not the default data


# Delimiters and names of columns


def test_another_delimiter_is_set_by_the_flag(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\tlabel\na, b\t1\nc\t2\n")
    for message in refusals([str(path)]):
        assert message.endswith(": see --csv_delimiter")
    pq.write_table(pa.table({"text": ["d"], "label": [1]}), tmp_path / "b.parquet")  # which the flag does not concern
    files = {"train_file": (str(path),), "validation_file": (str(tmp_path / "b.parquet"),)}
    config = DataOptions(**files, csv_delimiter=r"\t")
    options.check(config)
    tables = read_parts(config, ["text"], ["label"])
    assert column_of(tables[0], "text", "").to_pylist() == ["a, b", "c"]
    assert texts_of(load_documents(config, "text")[0]) == ["a, b", "c"]


def test_a_delimiter_that_is_invalid_or_without_effect_is_refused(tmp_path):
    config = DataOptions(train_file=(write(tmp_path / "a.jsonl", ROWS),), csv_delimiter=";")
    for load in (lambda: read_parts(config, ["text"], ["label"]), lambda: load_documents(config, "text")):
        assert refusal(load).startswith("--csv_delimiter ; has no effect on --train_file ")
    conll = [write(tmp_path / "a.tsv", ROWS)]
    assert "--csv_delimiter ; has no effect on" in refusal(read_files, conll, "--train_file", csv_delimiter=";")
    for mark in (";;", "", '"', "\n", "é"):
        assert "must be one character" in refusal(options.check, DataOptions(train_file=("a.csv",), csv_delimiter=mark))


def test_a_column_that_does_not_exist_is_refused_with_the_existing_ones(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("Text,label\na,1\n")
    message = refusal(column_of, read_file(str(path), "--train_file"), "text", "--text_column_names")
    assert message == f"--text_column_names text: --train_file {path} has no such column (columns: Text, label)"
    message = refusal(lambda: texts_of(of_files([str(path)], "--train_file", "text")))
    assert message.endswith("has no such column (columns: Text, label)")


def test_one_file_may_be_a_plain_string_in_python_and_in_a_config(tmp_path):
    (tmp_path / "config.yaml").write_text("train_file: a.csv\n")
    config = options.parse(DataOptions, ["--config", str(tmp_path / "config.yaml")])
    assert config == DataOptions(train_file="a.csv")
    assert config.train_file == ("a.csv",)


def test_a_line_without_the_column_is_a_document_without_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"words": "b"}\n')
    assert texts_of(of_files([str(tmp_path)], "--train_file", "text")) == ["a", None]
