"""Documents are read from any source once, in blocks of any size; what cannot be read is refused in one line."""

import json
import os
import re
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import refusal

from shared.cache.prepared import only_task
from shared.datasets import readers, rows
from shared.datasets.readers import blocks_of_lines, line_number
from shared.datasets.rows import content_of
from shared.options.data_options import DataOptions
from shared.text import corpus as corpora
from shared.text.corpus import first_texts, load_documents, of_files
from shared.text.encoder import batches_of_texts

pytestmark = pytest.mark.usefixtures("own_cache")


def test_the_end_of_a_line_is_not_part_of_a_document(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"\xef\xbb\xbfone \r\n\r\n two\tthree\nfour")
    assert read([tmp_path / "corpus.txt"])["text"].to_pylist() == ["one ", "", " two\tthree", "four"]


@pytest.mark.parametrize("replaced", [False, True], ids=["written over", "put in its place"])
def test_other_content_with_the_same_size_and_time_has_another_digest(tmp_path, replaced):
    """rsync -t and cp -p write such files."""
    path, other = tmp_path / "corpus.txt", tmp_path / "other.txt"
    path.write_text("one\n")
    before, digest = path.stat(), content_of(read([path]))
    assert content_of(read([path])) == digest
    time.sleep(0.05)  # the kernel's clock for file times has a resolution of a few milliseconds
    other.write_text("two\n")
    other.replace(path) if replaced else path.write_text("two\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert content_of(read([path])) != digest


def test_other_columns_of_a_json_file_may_have_different_types_in_each_row(tmp_path):
    rows = [{"text": "a", "meta": 1}, {"meta": {"x": [1, "y"]}, "text": "2020-01-01"}, {"text": None, "meta": "z"}]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "corpus.json").write_text(json.dumps(rows))
    for name in ("corpus.jsonl", "corpus.json"):
        assert read([tmp_path / name])["text"].to_pylist() == ["a", "2020-01-01", None]
        assert [*batches_of_texts(read([tmp_path / name]))] == [["a", "2020-01-01", ""]]


def test_the_embedded_docstrings_are_over_five_megabytes_and_held_out_by_file(monkeypatch):
    monkeypatch.undo()  # the user's cache: gathering takes a while, and other tests have done it
    sizes = [part.nbytes for part in load_documents(DataOptions(), "text")]
    assert sum(sizes) > 5e6
    assert 0.05 < sizes[1] / sum(sizes) < 0.3


def test_a_tokenizer_is_trained_on_the_first_texts_up_to_a_size():
    documents = pa.table({"text": [f"text {i}" for i in range(5000)]})
    assert first_texts(documents, 1 << 30).num_rows == 5000
    found = first_texts(documents, 10_000)["text"].to_pylist()
    assert sum(map(len, found[:-1])) < 10_000 <= sum(map(len, found))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("empty.txt", b"", "--train_file .* has no rows"),
        ("latin.txt", b"good\n\xe9t\xe9\n", r"--train_file .* is not UTF-8 \(line 2\)"),
        ("other.jsonl", b'{"words": "a"}\n', r"--text_column_name text: .* \(columns: words\)"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_one_line(tmp_path, name, content, expected):
    """Files of rows are read as for a table: test_readers.py has more of them."""
    (tmp_path / name).write_bytes(content)
    assert re.search(expected, refusal(of_files, [str(tmp_path / name)], "--train_file", "text"))


# Files

TEXTS = [f"document {i} " + "é, x " * (i % 7) for i in range(60)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Groups of files of about 300 bytes, and Arrow files of more than 100 bytes in small blocks."""
    monkeypatch.setattr(corpora, "GROUP_BYTES", 300)
    monkeypatch.setattr(rows, "IN_MEMORY", 100)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 50)


def write(folder, name, texts=TEXTS):
    """Write texts as a file of the kind given by its name."""
    path = folder / name
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=5)
    else:
        rows = [json.dumps({"text": text}) for text in texts] if path.suffix == ".jsonl" else texts
        path.write_text("".join(f"{row}\n" for row in rows))
    return str(path)


def read(names):
    return of_files([str(name) for name in names], "--train_file", "text")


@given(st.lists(st.text("aé\r \u2028", max_size=5), max_size=12), st.booleans(), st.booleans(), st.integers(1, 9))
def test_blocks_hold_each_line_once(tmp_path_factory, words, mark, ends, size):
    """Whatever the lines and the size of a block: it may end inside a character, or be shorter than a line."""
    content = b"\xef\xbb\xbf" * mark + "\n".join(words).encode() + b"\n" * ends
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(content)
    expected = re.findall(rb"[^\n]*\n|[^\n]+", content)
    starts = [sum(map(len, expected[:i])) for i in range(len(expected))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK_BYTES", size)
        found = [*blocks_of_lines(path, "here")]
        assert b"".join(block for _, block in found) == content[3 * mark :]
        assert {at for at, _ in found} <= {*starts}
        assert [line_number(path, "here", at) for at in starts] == list(range(1, len(expected) + 1))


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_every_kind_of_file_has_its_documents(small_blocks, tmp_path, kind):
    """test_files.py has the other kinds, and compressed files."""
    documents = read([write(tmp_path, f"a.{kind}")])
    assert documents["text"].to_pylist() == TEXTS
    batches = [batch for start in range(0, 60, 7) for batch in batches_of_texts(documents.slice(start, 7))]
    assert [text for batch in batches for text in batch] == TEXTS, "also some of them"


def test_processes_and_tasks_begin_with_different_files(small_blocks, tmp_path, monkeypatch):
    names = [write(tmp_path, f"{name}.txt") for name in "abcd"]
    loaded = []
    load = corpora.load_files
    monkeypatch.setattr(corpora, "load_files", lambda files, *rest: loaded.append(files[0].stem) or load(files, *rest))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with only_task(0, 2):
        first = read(names)
    with only_task(1, 2):
        again = read(names)
    assert "".join(loaded) == "bcda" + "dabc"
    assert first["text"].to_pylist() == again["text"].to_pylist() == 4 * TEXTS
