"""Files of rows are read without changes; what cannot be read is refused in one line with the name of the file."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_files import ROWS, in_both_ways, refusal, values, write

from shared.datasets import readers
from shared.datasets.readers import blocks_of_lines
from shared.datasets.rows import column_of, source_of
from shared.datasets.tables import read_file
from shared.errors import UserError


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
@pytest.mark.usefixtures("own_cache")
def test_the_same_rows_are_read_from_every_kind_of_text_file(tmp_path, name, content):
    path = write(tmp_path / name, content)
    for table in in_both_ways(lambda: read_file(str(path), "--train_file")):
        assert values(table) == ROWS
        assert source_of(table) == f"--train_file {path}"


NUMBERS = [*range(30), *(i + 0.5 for i in range(20))]


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("a.csv", [{"x": number} for number in NUMBERS]),
        ("a.jsonl", [{"x": number} for number in NUMBERS]),
        ("a.json", [{"text": f"é {i}", "label": [i] * (i % 3)} for i in range(50)]),
        ("late.jsonl", [{"text": "2020-01-01" if i < 9 else f"é {i}"} for i in range(20)]),
        ("more.jsonl", [{"text": f"é {i}", "x": i if i > 8 else None} for i in range(20)]),
        ("gaps.jsonl", [{"x": [None, i], "y": [None], "text": {"label": [[None, f"é {i}"], []]}} for i in range(20)]),
    ],
)
def test_columns_and_types_are_those_of_the_whole_file_and_not_of_a_block(tmp_path, name, rows):
    lines = [json.dumps({key: value for key, value in row.items() if value is not None}) for row in rows]
    content = {"csv": "x\n" + "\n".join(str(row.get("x")) for row in rows), "json": json.dumps(rows, indent=1)}
    path = write(tmp_path / name, content.get(name.partition(".")[2], "\n".join(lines)))
    small, large = in_both_ways(lambda: read_file(str(path), "--train_file"))
    assert values(small) == values(large) == rows
    assert small.schema.types == large.schema.types


@pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
def test_parquet_is_read_in_every_codec(tmp_path, codec):
    kinds = pa.array(["a", "b"] * 25).dictionary_encode()
    lists, pairs = pa.ListArray.from_arrays(range(51), kinds), pa.FixedSizeListArray.from_arrays(kinds, 1)
    texts, maps = [f"é {i}" for i in range(50)], pa.MapArray.from_arrays(range(51), kinds.cast(pa.string()), kinds)
    table = pa.table({"text": texts, "kind": kinds, "kinds": lists, "pairs": pairs, "maps": maps})
    for type_ in (pa.string_view(), pa.binary_view()):
        table = table.append_column(str(type_), table["text"].cast(pa.binary()).cast(type_))
    pq.write_table(table, tmp_path / "a.parquet", compression=codec, row_group_size=7)
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "a.parquet").read_bytes()))
    for name in ("a.parquet", "b.parquet.gz"):
        assert read_file(str(tmp_path / name), "--train_file").filter([True] * 50).to_pylist() == table.to_pylist()


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
@pytest.mark.parametrize(
    "texts", [["1", "02"], ["2020-01-01", "2020-01-02 10:00:00"], ["NA", "null"], ["true", "1.50"]]
)
def test_a_text_column_is_read_exactly_as_it_is_written(tmp_path, name, texts):
    separator = "\t" if name.endswith("tsv") else ","
    lines = ["text" + separator + "label", *(f"{text}{separator}x" for text in texts)]
    if name.endswith("jsonl"):
        lines = [json.dumps({"text": text, "label": "x"}) for text in texts]
    table = read_file(str(write(tmp_path / name, "\n".join(lines) + "\n")), "--train_file")
    assert column_of(table, "text", "--text_column_names").to_pylist() == texts


# Invalid files

LATIN = "text,label\nvéry\n".encode() + "café,1\n".encode("latin-1")
LINES = b'{"text": "a", "label": 1}\n\n'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.csv", None, ": no such file"),
        ("a.xlsx", b"text", ": unknown kind of file: use .csv, .tsv, .json, .jsonl, .parquet, optionally compressed"),
        ("a.csv", b"", ": Empty CSV file"),
        ("a.jsonl", b"\n \n", " has no rows"),
        ("a.csv", b"text,label\n", " has no rows"),
        ("a.json", b"[]", " has no rows"),
        ("a.parquet", b"text,label\na,1\n", ": "),
        ("a.csv", b"\x89PNG\x00\xff\xfe\x01", " is not UTF-8 (line 1): convert it"),
        ("a.jsonl", b"\x89PNG\x00\xff\xfe\x01", " is not UTF-8 (line 1): convert it"),
        ("a.csv", LATIN, " is not UTF-8 (line 3): convert it, for instance with iconv -f LATIN1 "),
        ("a.csv", "text\n1".encode("utf-16"), " is not UTF-8 (line 1): convert it, for instance with iconv -f UTF-16"),
        ("a.jsonl", LATIN, " is not UTF-8 (line 3): convert it"),
        ("a.csv", b"text,label\nab,1\nde,2,3\n", ": CSV parse error: Row #3: Expected 2 columns, got 3"),
        ("a.csv", b'text,label\n"ab,1\n' + b"de,2\n" * 50, ": "),
        ("a.csv", b"text,text\na,b\n", " has two columns with the name text"),
        ("a.csv", b"text;label\na, b;1\n", " has no ',' in its first line, 'text;label': see --csv_delimiter"),
        ("a.jsonl", LINES + b'{"text": "b" "label": 2}\n', " is malformed in line 3: Expecting ',' delimiter"),
        ("a.jsonl", LINES + b'{"text": "b', " is malformed in line 3: Unterminated string"),
        ("a.jsonl", LINES + b"[1]\n", " is malformed in line 1 or later: JSON parse error"),
        ("a.jsonl", b"\nnull\n" + LINES, " is malformed in line 1 or later: a row is null"),
        ("a.json", b"[null, {}]", ": a row is null"),
        ("a.json", b'[{"a": 1}, 2]', ": "),
        ("a.json", b'[{"a": 1}, {"a"', ": "),
    ],
)
@pytest.mark.parametrize("block", [1 << 22, 64])
def test_a_file_that_cannot_be_read_is_refused_in_one_line(tmp_path, monkeypatch, name, content, expected, block):
    monkeypatch.setattr(readers, "BLOCK_BYTES", block)
    if content is not None:
        write(tmp_path / name, content)
    assert refusal(tmp_path / name).startswith(expected)


@given(st.lists(st.text("aé\n", max_size=9)), st.integers(1, 9))
def test_the_first_line_that_is_not_utf8_is_found_wherever_blocks_end(tmp_path_factory, words, block):
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    good = "".join(words).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK_BYTES", block)
        path.write_bytes(good)
        assert b"".join(lines for _, lines in blocks_of_lines(path, "x")) == good
        path.write_bytes(good + b"\xff" + good)
        with pytest.raises(UserError, match=rf"x is not UTF-8 \(line {good.count(10) + 1}\)"):
            list(blocks_of_lines(path, "x"))


def test_text_of_a_parquet_file_that_is_not_utf8_is_refused(tmp_path):
    offsets = pa.py_buffer(np.array([0, 2, 4], np.int32).tobytes())
    broken = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a \xff ")])
    pq.write_table(pa.table({"text": broken}), tmp_path / "a.parquet")
    assert "Invalid UTF8" in refusal(tmp_path / "a.parquet")


# Quotation marks

STRAY = ["text\tlabel", *(f"row {i}\t{i % 2}" for i in range(200))]


@pytest.mark.parametrize(
    ("first", "last", "name"), [('"row', '"row', "a.tsv"), ('"row', 'row"', "a.tsv"), ('"row', '"row', "a.csv")]
)
def test_quotation_marks_that_swallow_rows_are_refused_with_their_lines(tmp_path, first, last, name):
    lines = [*STRAY]
    lines[19] = lines[19].replace(first.strip('"'), first)
    lines[92] = lines[92].replace(last.strip('"'), last)
    content = "\n".join(lines).replace("\t", "\t" if name.endswith("tsv") else ",") + "\n"
    assert "the quotation mark in line 20 is closed inside of line 93" in refusal(write(tmp_path / name, content))


def test_a_quoted_field_of_a_csv_file_that_looks_like_rows_is_reported(tmp_path, capsys):
    lines = [*STRAY]
    lines[19], lines[92] = lines[19].replace("row", '"row'), lines[92].replace("row 91", 'row 91"')
    path = write(tmp_path / "a.csv", "\n".join(lines).replace("\t", ",") + "\n")
    assert read_file(str(path), "--train_file").num_rows == 127
    assert "begins in line 20 continues to line 93 and contains lines that look like rows" in capsys.readouterr().err
    write(path, 'text,label\n"a poem\nof three lines\nwithout them",1\n"say ""hi"", twice\nor so",2\n')
    assert read_file(str(path), "--train_file").num_rows == 2
    assert not capsys.readouterr().err
