"""The parts of a corpus hold all documents, once and in order, and each can be read without the others."""

import json
import re
from functools import partial
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_files import COMPRESS

from shared.datasets import documents as documents_module
from shared.datasets import readers
from shared.datasets.documents import Documents, Part, of_file, of_files, of_table, small_together
from shared.datasets.readers import blocks_of_lines, line_number, row_groups
from shared.errors import UserError

pytestmark = pytest.mark.usefixtures("own_cache")

TEXTS = [f"document {i} " + "é, x " * (i % 7) for i in range(60)]
KINDS = ("txt", "jsonl", "csv", "parquet", "json", "txt.gz", "jsonl.zst", "csv.xz", "parquet.gz")


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of about 300 bytes and 7 rows."""
    monkeypatch.setattr(documents_module, "PART_BYTES", 300)
    monkeypatch.setattr(documents_module, "PART_ROWS", 7)
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


@given(st.lists(st.text("aé\r \u2028", max_size=5), max_size=12), st.booleans(), st.booleans(), st.data())
def test_ranges_of_bytes_hold_each_line_once(tmp_path_factory, words, mark, ends, data):
    """Whatever the lines and wherever the file is cut: also inside a character, or several times inside a line."""
    content = b"\xef\xbb\xbf" * mark + "\n".join(words).encode() + b"\n" * ends
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(content)
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(content) - 1)))) | {0, len(content)})
    expected = re.findall(rb"[^\n]*\n|[^\n]+", content)
    starts = [sum(map(len, expected[:i])) for i in range(len(expected))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK_BYTES", data.draw(st.integers(1, 9)))
        found = [block for cut in pairwise(cuts) for block in blocks_of_lines(path, "here", range(*cut))]
        assert b"".join(block for _, block in found) == content[3 * mark :]
        assert {at for at, _ in found} <= {*starts}
        assert [line_number(path, "here", at) for at in starts] == list(range(1, len(expected) + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_the_parts_of_every_kind_of_file_hold_its_documents(tmp_path, small_parts, kind):
    documents = of_file(write(tmp_path, f"a.{kind}"), "--train_file", "text")
    parts = documents.parts()
    assert [text for part in parts for text in texts_of(part)] == TEXTS == texts_of(documents)
    assert texts_of(parts[-1]) == texts_of(parts[-1]), "a part can be read again"
    several = kind in ("txt", "jsonl", "parquet")
    assert (len(parts) > 5, parts[0].long) == (several, not several)
    assert len({part.content for part in parts}) == len(parts)


def test_parts_depend_on_the_content_and_not_on_the_path(tmp_path, small_parts):
    first = of_file(write(tmp_path, "a.txt"), "--train_file", "text").parts()
    again = of_file(write(tmp_path, "b.txt"), "--train_file", "text").parts()
    other = of_file(write(tmp_path, "c.txt", TEXTS[:-1]), "--train_file", "text").parts()
    contents = [[part.content for part in parts] for parts in (first, again, other)]
    assert contents[0] == contents[1]
    assert not {*contents[0]} & {*contents[2]}


def test_the_rows_of_a_table_are_parts(small_parts):
    documents = of_table(pa.table({"text": TEXTS}), "text")
    assert [len(texts_of(part)) for part in documents.parts()] == [7] * 8 + [4]
    assert [text for part in documents.parts() for text in texts_of(part)] == TEXTS


def test_small_files_are_one_part_and_large_files_have_several(tmp_path, small_parts):
    sizes = {"a": 2, "b": 2, "c": 40, "d": 1, "e": 1}
    names = [write(tmp_path, f"{name}.txt", TEXTS[:count]) for name, count in sizes.items()]
    parts = of_files(names, "--train_file", "text").parts()
    texts = [texts_of(part) for part in parts]
    assert texts[0] == TEXTS[:2] * 2
    assert texts[-1] == TEXTS[:1] * 2
    assert [text for part in texts[1:-1] for text in part] == TEXTS[:40]
    assert len(texts) > 4
    of_c = of_file(names[2], "--train_file", "text").parts()
    assert [part.content for part in of_c] == [part.content for part in parts[1:-1]]


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 12))
def test_groups_of_files_are_as_large_as_possible(sizes, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PART_BYTES", most)
        groups = small_together([Documents(str(i), lambda: iter([]), list) for i in range(len(sizes))], sizes)
    numbers = [[int(each.source) for each in group] for group in groups]
    assert [i for group in numbers for i in group] == list(range(len(sizes)))
    totals = [sum(sizes[i] for i in group) for group in numbers]
    assert all(total <= most or len(group) == 1 for total, group in zip(totals, numbers, strict=True))
    assert all(total + sizes[after[0]] > most for total, after in zip(totals, numbers[1:], strict=False))


def test_row_groups_are_together_up_to_a_size_and_a_large_one_is_a_long_part(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path, row_group_size=20)
    sizes = [pq.read_metadata(path).row_group(i).total_byte_size for i in range(3)]
    assert row_groups(path, sum(sizes)) == [(range(3), sum(sizes))]
    assert row_groups(path, sum(sizes[:2])) == [(range(2), sum(sizes[:2])), (range(2, 3), sizes[2])]
    assert [group for group, _ in row_groups(path, 1)] == [range(1), range(1, 2), range(2, 3)]
    monkeypatch.setattr(documents_module, "PART_BYTES", 1)
    assert all(part.long for part in of_file(path, "--train_file", "text").parts())


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.txt"])
def test_an_error_in_any_part_names_the_line_of_the_file(tmp_path, small_parts, name):
    path = tmp_path / name
    bad, problem = (b"\xe9\n", "is not UTF-8 (line 41)") if name == "a.txt" else (b"{\n", "malformed in line 41")
    whole = write(tmp_path, name.removesuffix(".zst"), TEXTS[:40])
    with open(whole, "ab") as file:  # noqa: PTH123
        file.write(bad)
        file.write(b'{"text": "after"}\n' * 40)
    if name.endswith(".zst"):
        path.write_bytes(COMPRESS["zst"]((tmp_path / "a.jsonl").read_bytes()))

    def read(part: Part):
        with pytest.raises(UserError, match=re.escape(problem)) as caught:
            texts_of(part)
        assert str(caught.value).startswith(f"--train_file {path} ")
        return True

    parts = of_file(path, "--train_file", "text").parts()
    readable = [part for part in parts if not fails(partial(texts_of, part))]
    assert len(readable) == len(parts) - 1
    assert all(read(part) for part in parts if part not in readable)


def fails(function):
    try:
        function()
    except UserError:
        return True
    return False
