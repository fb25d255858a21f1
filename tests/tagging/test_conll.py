"""CoNLL files are read by Arrow where that gives what reading line by line gives, at any cut into pieces."""

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.datasets import files
from shared.errors import UserError
from shared.tagging import conll

LINES = ["", " ", "\t", "\r", "\t\t", "-DOCSTART-\t\tO", "-DOCSTART-", "a\tO", "a b\tB-x", "é\tx\tO", "b O", "c x O"]
LINES += ["d  O", " e O", "f O ", "g\tO\r", "h\t", "\tO", "i\tO ", "'\"\tO", '"\tI-"', "NA\tnull", "\u00a0", "a"]
LINES += ["\u00a0\tO", "\ufeffj\tO"]


def read(path, monkeypatch, by_lines, untagged=False):
    """The sentences of a file as lists of columns, or the message of the error."""
    with monkeypatch.context() as patch:
        if by_lines:
            patch.setattr(conll, "_by_columns", lambda *_: None)
        try:
            return [row for table in conll.read_conll(path, "--train_file x", untagged) for row in table.to_pylist()]
        except UserError as error:
            return str(error)


@given(
    st.one_of(st.lists(st.sampled_from(LINES), max_size=12), st.lists(st.sampled_from(["", "a\tO", "-DOCSTART-\tO"]))),
    *(st.booleans() for _ in range(2)),
    st.integers(1, 30),
)
@example(["a\tO", "", "", "", "b\tO", "", "", "c\tO"], True, False, 100)
@example(["a\tx\tO", "\tx\t"], True, False, 100)  # a line without word and tag is not empty
@example(["a\tO", "", "\ufeffb\tO"], True, False, 5)  # the second piece begins with a byte order mark
@example(["a x O", "", "-DOCSTART- x O", "", "b x O"], False, False, 100)
def test_arrow_reads_what_is_read_line_by_line(tmp_path_factory, lines, newline_at_end, untagged, size):
    path = tmp_path_factory.mktemp("conll") / "words.conll"
    path.write_bytes("\n".join([*lines, *[""] * newline_at_end]).encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "BLOCK_BYTES", size)
        patch.setattr(conll, "BLOCK_WORDS", 3)
        found, expected = (read(path, patch, by_lines, untagged) for by_lines in (False, True))
    assert found == expected


@pytest.mark.parametrize("separator", ["\t", " "])
def test_ordinary_files_are_read_by_arrow_in_blocks_of_whole_sentences(separator, monkeypatch, tmp_path):
    path, words = tmp_path / "words.conll", 0
    with path.open("w") as file:
        for sentence in range(200):
            file.write(f"-DOCSTART-{separator}O\n\n" if sentence % 50 == 0 else "")
            file.writelines(f"word{words + i}{separator}B-x\n" for i in range(sentence % 7))
            words += sentence % 7
            file.write("\n")
    monkeypatch.setattr(conll, "_by_lines", None)
    monkeypatch.setattr(files, "BLOCK_BYTES", 100)
    monkeypatch.setattr(conll, "BLOCK_WORDS", 20)
    tables = [*conll.read_conll(path, "x")]
    assert max(sum(map(len, table["tokens"].to_pylist())) for table in tables) < 20 + 12 + 7
    rows = pa.concat_tables(tables).to_pylist()
    assert [len(row["tokens"]) for row in rows] == [count for i in range(200) if (count := i % 7)]
    assert [word for row in rows for word in row["tokens"]] == [f"word{i}" for i in range(words)]
    assert {tag for row in rows for tag in row["tags"]} == {"B-x"}
