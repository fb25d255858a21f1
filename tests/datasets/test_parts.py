"""The parts of a corpus hold all documents, once and in order, and each can be read without the others."""

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_files import COMPRESS

from shared.datasets import arrow_files, readers
from shared.datasets import documents as documents_module
from shared.datasets.documents import of_files, of_table, small_together
from shared.datasets.readers import blocks_of_lines, line_number

pytestmark = pytest.mark.usefixtures("own_cache")

TEXTS = [f"document {i} " + "é, x " * (i % 7) for i in range(60)]
KINDS = ("txt", "jsonl", "csv", "parquet", "json", "txt.gz", "jsonl.zst", "csv.xz", "parquet.gz")


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of about 300 bytes, and Arrow files of more than 100 bytes."""
    monkeypatch.setattr(documents_module, "PART_BYTES", 300)
    monkeypatch.setattr(arrow_files, "IN_MEMORY", 100)
    monkeypatch.setattr(documents_module, "BATCH_DOCUMENTS", 4)
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


def texts_of(part):
    return [text for batch in part.batches() for text in batch]


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
def test_the_parts_of_every_kind_of_file_hold_its_documents(tmp_path, small_parts, kind):
    documents = of_files([write(tmp_path, f"a.{kind}")], "--train_file", "text")
    parts = documents.parts
    assert [text for part in parts for text in texts_of(part)] == TEXTS == texts_of(documents)
    assert texts_of(parts[-1]) == texts_of(parts[-1]), "a part can be read again"
    assert (len(parts) > 2) == (kind != "json"), "an array of few rows is one block"
    assert len({part.content for part in parts}) == len(parts)


def test_parts_depend_on_the_content_and_not_on_the_path(tmp_path, small_parts):
    first = of_files([write(tmp_path, "a.txt")], "--train_file", "text").parts
    again = of_files([write(tmp_path, "b.txt")], "--train_file", "text").parts
    other = of_files([write(tmp_path, "c.txt", TEXTS[:-1])], "--train_file", "text").parts
    contents = [[part.content for part in parts] for parts in (first, again, other)]
    assert contents[0] == contents[1]
    assert not {*contents[0]} & {*contents[2]}


def test_the_parts_of_a_table_in_memory_have_the_digests_of_their_texts(small_parts):
    table = pa.chunked_array([TEXTS[start : start + 7] for start in range(0, len(TEXTS), 7)])
    documents = of_table(pa.table({"text": table}), "text")
    again = of_table(pa.table({"text": table, "other": table}), "text")
    assert [text for part in documents.parts for text in texts_of(part)] == TEXTS
    assert len(documents.parts) > 4
    assert documents.content() == again.content()
    assert documents.content() != of_table(pa.table({"text": table.slice(1)}), "text").content()


def test_small_files_are_read_together_and_large_files_have_several_parts(tmp_path, small_parts):
    sizes = {"a": 2, "b": 2, "c": 40, "d": 1, "e": 1}
    names = [write(tmp_path, f"{name}.txt", TEXTS[:count]) for name, count in sizes.items()]
    texts = [texts_of(part) for part in of_files(names, "--train_file", "text").parts]
    assert texts[0] == TEXTS[:2] * 2
    assert texts[-1] == TEXTS[:1] * 2
    assert [text for part in texts[1:-1] for text in part] == TEXTS[:40]
    assert len(texts) > 4


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 12))
def test_groups_are_as_large_as_possible(sizes, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PART_BYTES", most)
        groups = small_together(sizes)
    assert [i for group in groups for i in group] == list(range(len(sizes)))
    totals = [sum(sizes[i] for i in group) for group in groups]
    assert all(total <= most or len(group) == 1 for total, group in zip(totals, groups, strict=True))
    assert all(total + sizes[after[0]] > most for total, after in zip(totals, groups[1:], strict=False))
