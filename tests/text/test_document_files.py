"""The documents of files of every kind are read once, whatever the sizes of the files and of the blocks."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from large_data import COMPRESS

from shared.cache.prepared import only_task
from shared.datasets import arrow_files, readers
from shared.datasets.readers import blocks_of_lines, line_number
from shared.text import documents as documents_module
from shared.text.documents import of_files, of_table, small_together

pytestmark = pytest.mark.usefixtures("own_cache")

TEXTS = [f"document {i} " + "é, x " * (i % 7) for i in range(60)]
KINDS = ("txt", "jsonl", "csv", "parquet", "json", "txt.gz", "jsonl.zst", "csv.xz", "parquet.gz")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Groups of files of about 300 bytes, and Arrow files of more than 100 bytes in small blocks."""
    monkeypatch.setattr(documents_module, "GROUP_BYTES", 300)
    monkeypatch.setattr(arrow_files, "IN_MEMORY", 100)
    monkeypatch.setattr(readers, "BLOCK_BYTES", 50)


def write(folder, name, texts=TEXTS):
    """Write texts as a file of the kind given by its name."""
    path = folder / name
    kind, *compression = path.suffixes
    if kind == ".parquet":
        pq.write_table(pa.table({"text": texts}), path, row_group_size=5)
        content = path.read_bytes()
    elif kind == ".csv":
        content = ("text\n" + "".join(f'"{text}"\n' for text in texts)).encode()
    elif kind == ".jsonl":
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    elif kind == ".json":
        content = json.dumps([{"text": text} for text in texts]).encode()
    else:
        content = "".join(f"{text}\n" for text in texts).encode()
    path.write_bytes(COMPRESS[compression[0][1:]](content) if compression else content)
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


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_has_its_documents(tmp_path, kind):
    documents = read([write(tmp_path, f"a.{kind}")])
    assert documents.texts.to_pylist() == TEXTS
    blocks = [[*documents.batches(range(start, min(start + 7, 60)))] for start in range(0, 60, 7)]
    assert [text for block in blocks for batch in block for text in batch] == TEXTS, "also some of them"


def test_the_digest_depends_on_the_content_and_not_on_the_path(tmp_path):
    first, again, other = write(tmp_path, "a.txt"), write(tmp_path, "b.txt"), write(tmp_path, "c.txt", TEXTS[:-1])
    assert read([first]).content == read([again]).content != read([other]).content


def test_a_table_in_memory_has_the_digest_of_its_texts():
    texts = pa.chunked_array([TEXTS[start : start + 7] for start in range(0, len(TEXTS), 7)])
    one, again = pa.table({"text": texts}), pa.table({"text": TEXTS, "other": TEXTS})
    assert of_table(one, "text").content == of_table(again, "text").content
    assert of_table(one, "text").content != of_table(one.slice(1), "text").content


def test_small_files_are_read_together(tmp_path, monkeypatch):
    sizes, groups = {"a": 2, "b": 2, "c": 40, "d": 1, "e": 1}, []
    load = arrow_files.load
    monkeypatch.setattr(arrow_files, "load", lambda files, *rest: groups.append(len(files)) or load(files, *rest))
    documents = read([write(tmp_path, f"{name}.txt", TEXTS[:count]) for name, count in sizes.items()])
    assert groups == [2, 1, 2]
    assert documents.texts.to_pylist() == TEXTS[:2] * 2 + TEXTS[:40] + TEXTS[:1] * 2


def test_processes_and_tasks_begin_with_different_files(tmp_path, monkeypatch):
    names = [write(tmp_path, f"{name}.txt") for name in "abcd"]
    loaded = []
    load = arrow_files.load
    monkeypatch.setattr(arrow_files, "load", lambda files, *rest: loaded.append(files[0].stem) or load(files, *rest))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with only_task(0, 2):
        first = read(names)
    with only_task(1, 2):
        again = read(names)
    assert "".join(loaded) == "bcda" + "dabc"
    assert first.texts.to_pylist() == again.texts.to_pylist() == 4 * TEXTS


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 12))
def test_groups_are_as_large_as_possible(sizes, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "GROUP_BYTES", most)
        groups = small_together(sizes)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    totals = [sum(sizes[i] for i in group) for group in groups]
    assert all(total <= most or len(group) == 1 for total, group in zip(totals, groups, strict=True))
    assert all(total + sizes[after[0]] > most for total, after in zip(totals, groups[1:], strict=False))
