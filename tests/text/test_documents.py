"""Documents are read from any source, and what cannot be read is refused in one line."""

import json
import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shared.datasets import readers
from shared.errors import UserError
from shared.options.data_options import DataOptions
from shared.text.documents import first_texts, load_documents, of_files, of_table

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_end_of_a_line_is_not_part_of_a_document(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"\xef\xbb\xbfone \r\n\r\n two\tthree\nfour")
    found = of_files([str(tmp_path / "corpus.txt")], "--train_file", "text")
    assert found.texts.to_pylist() == ["one ", "", " two\tthree", "four"]


@pytest.mark.parametrize("replaced", [False, True], ids=["written over", "put in its place"])
def test_other_content_with_the_same_size_and_time_has_another_digest(tmp_path, replaced):
    """rsync -t and cp -p write such files."""
    path, other = tmp_path / "corpus.txt", tmp_path / "other.txt"
    path.write_text("one\n")
    before, digest = path.stat(), of_files([str(path)], "--train_file", "text").content
    assert of_files([str(path)], "--train_file", "text").content == digest
    time.sleep(0.05)  # the kernel's clock for file times has a resolution of a few milliseconds
    other.write_text("two\n")
    other.replace(path) if replaced else path.write_text("two\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert of_files([str(path)], "--train_file", "text").content != digest


def test_other_columns_of_a_file_may_change_their_type(tmp_path, monkeypatch):
    """A type inferred from the first block of a file need not hold for later blocks."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 200)
    rows = [f"{i},text {i}" for i in range(200)] + ["x,last"]
    (tmp_path / "corpus.csv").write_text("\n".join(["id,text", *rows]))
    found = of_files([str(tmp_path / "corpus.csv")], "--train_file", "text")
    assert found.texts.to_pylist() == [*(f"text {i}" for i in range(200)), "last"]


def test_other_columns_of_a_json_file_may_have_different_types_in_each_row(tmp_path):
    rows = [{"text": "a", "meta": 1}, {"meta": {"x": [1, "y"]}, "text": "2020-01-01"}, {"text": None, "meta": "z"}]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "corpus.json").write_text(json.dumps(rows))
    for name in ("corpus.jsonl", "corpus.json"):
        found = of_files([str(tmp_path / name)], "--train_file", "text")
        assert found.texts.to_pylist() == ["a", "2020-01-01", None]
        assert [*found.batches(range(3))] == [["a", "2020-01-01", ""]]


def test_the_embedded_docstrings_are_over_five_megabytes_and_held_out_by_file(monkeypatch):
    monkeypatch.undo()  # the user's cache: gathering takes a while, and other tests have done it
    train, validation = load_documents(DataOptions(), "text")
    sizes = [part.texts.nbytes for part in (train, validation)]
    assert sum(sizes) > 5e6
    assert 0.05 < sizes[1] / sum(sizes) < 0.3


def test_a_tokenizer_is_trained_on_the_first_texts_up_to_a_size():
    documents = of_table(pa.table({"text": [f"text {i}" for i in range(5000)]}), "text")
    assert first_texts(documents, 1 << 30).num_rows == 5000
    found = first_texts(documents, 10_000)["text"].to_pylist()
    assert sum(map(len, found[:-1])) < 10_000 <= sum(map(len, found))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", "is empty"),
        ("latin.txt", b"good\n\xe9t\xe9\n", "not UTF-8 (line 2)"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "malformed in line 2: Expecting value"),
        ("other.jsonl", b'{"words": "a"}\n', "no such column (columns: words)"),
        ("number.jsonl", b'{"text": "a"}\n{"text": 5}\n', "malformed in line 1 or later: JSON parse error: Column"),
        ("twice.tsv", b"id\tid\ttext\n1\t2\ta\n", "two columns with the name id: rename one"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_one_line(tmp_path, name, content, expected):
    """Files of rows are read as for a table: test_readers.py has more of them."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        of_files([str(tmp_path / name)], "--train_file", "text")
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert "--train_file" in message or "--text_column_name" in message


def test_a_column_of_numbers_is_refused(tmp_path):
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    with pytest.raises(UserError, match="contains int64, not text"):
        of_files([str(tmp_path / "numbers.parquet")], "--train_file", "text")
    with pytest.raises(UserError, match="contains int64, not text"):
        of_table(pa.table({"text": [1, 2]}), "text")
