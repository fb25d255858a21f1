"""Files of rows are read without changes; errors name the malformed line."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_files import ROWS, refusal, values, write

from shared.datasets import files, readers
from shared.datasets.rows import source_of
from shared.datasets.tables import read_file
from shared.errors import UserError


@contextmanager
def without_privileges() -> Iterator[None]:
    """Drop the privileges of root, because root can read every file."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# Valid files


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


# Invalid files


def test_a_missing_file_is_refused(tmp_path):
    assert refusal(tmp_path / "gone.csv") == ": no such file"


def test_a_folder_without_data_is_refused(tmp_path):
    for name in ("folder.csv", "folder"):
        (tmp_path / name).mkdir()
        assert refusal(tmp_path / name).startswith(" is a folder without data files (.csv, ")


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
    known = ".csv, .tsv, .json, .jsonl, .parquet, optionally compressed (.gz, .bz2, .xz, .zst)"
    assert refusal(path) == f": unknown kind of file: use {known}"


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.json", "a.jsonl"])
def test_binary_garbage_is_refused(tmp_path, name):
    assert "is not text (byte 4 is zero)" in refusal(write(tmp_path / name, b"\x89PNG\x00\xff\xfe\x01"))


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
    assert "is malformed: " in refusal(write(tmp_path / "a.parquet", b"text,label\na,1\n"))


def test_a_parquet_file_that_was_cut_off_is_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    assert "is malformed: " in refusal(write(tmp_path / "a.parquet", content[: len(content) // 2]))


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_non_utf8_is_refused_with_byte_and_line(tmp_path, name):
    path = write(tmp_path / name, "text,label\nvéry\n".encode() + "café,1\n".encode("latin-1"))
    assert "is not UTF-8 (byte 20, line 3): convert it" in refusal(path)


def test_utf16_is_named_in_the_error(tmp_path):
    assert "is UTF-16" in refusal(write(tmp_path / "a.csv", "text,label\na,1\n".encode("utf-16")))


@given(prefix=st.text(max_size=20), block=st.integers(1, 9))
def test_the_first_byte_that_is_not_utf8_is_found_wherever_blocks_end(prefix, block):
    good = prefix.replace("\0", "").encode()
    line = good.count(b"\n") + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", block)
        files.refuse_non_utf8(good, "x")
        with pytest.raises(UserError, match=rf"\(byte {len(good)}, line {line}\)"):
            files.refuse_non_utf8(good + b"\xff" + good, "x")


def test_a_row_of_a_csv_file_with_too_many_fields_is_named(tmp_path):
    path = write(tmp_path / "a.csv", "text,label\nab,1\nde,2,3\n")
    assert "is malformed: CSV parse error: Row #3: Expected 2 columns, got 3" in refusal(path)


def test_a_quotation_mark_that_is_never_closed_is_refused(tmp_path, monkeypatch):
    path = write(tmp_path / "a.csv", 'text,label\n"ab,1\n' + "de,2\n" * 50)
    assert "is malformed: " in refusal(path)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 64)
    assert "quotation mark" in refusal(path)
    with (
        path.open("rb") as file,
        pytest.raises(UserError, match="here is malformed: the row from line 2 is longer than"),
    ):
        readers.check_quotes(file, ",", "here")


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


@pytest.mark.parametrize(("content", "reason"), [('[{"a": 1}, 2]', "element 2 "), ('[{"a": 1}, {"a"', "element 2 ")])
def test_a_broken_json_array_is_refused(tmp_path, content, reason):
    assert reason in refusal(write(tmp_path / "a.json", content))


def test_two_columns_of_one_name_are_refused(tmp_path):
    assert "two columns with the name text" in refusal(write(tmp_path / "a.csv", "text,text\na,b\n"))
