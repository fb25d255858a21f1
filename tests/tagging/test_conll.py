"""CoNLL files are read in all their forms, as line by line, at any cut into pieces."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.datasets import readers
from shared.errors import UserError
from shared.tagging.tagged_texts import read_conll

DOCUMENTS = "-DOCSTART- -X- O O\n\nEU NNP x B-ORG\ncall NN x O\n\n\n-DOCSTART- -X- O O\n\nPeter NNP y B-PER\n\n"
WINDOWS = "\ufeffEU B-ORG\r\nrejects O\r\n\r\nPeter B-PER\r\nBlackburn I-PER\r\n"
LINES = ["", " ", "\t", "\r", "\t\t", "-DOCSTART-\t\tO", "-DOCSTART-", "a\tO", "a b\tB-x", "é\tx\tO", "b O", "c x O"]
LINES += ["d  O", " e O", "f O ", "g\tO\r", "h\t", "\tO", "i\tO ", "'\"\tO", '"\tI-"', "NA\tnull", "\u00a0", "a"]
LINES += ["\u00a0\tO", "\ufeffj\tO"]


def line_by_line(text, untagged):
    """A second implementation: the sentences as lists of words and tags, or the number of the malformed line."""
    sentences, width = [[]], None
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        bare = line.rstrip("\r")
        if not line.strip() or line.startswith("-DOCSTART-"):
            sentences.append([])
            continue
        fields = bare.split("\t") if "\t" in bare else re.split(" +", bare.strip(" "))
        width = width or len(fields)
        if len(fields) != width or width < 2 - untagged or not fields[-1].strip():
            return number
        sentences[-1].append((fields[0], fields[-1].strip())[:width])
    return [sentence for sentence in sentences if sentence] or None


def read(path, untagged=False):
    """The sentences of a file as lists of words and tags, the number of the malformed line, or None without words."""
    try:
        rows = [row for table in read_conll(path, "--train_file x", untagged) for row in table.to_pylist()]
        return [list(zip(*row.values(), strict=True)) for row in rows]
    except UserError as error:
        found = re.search(r"malformed in line ([\d,]+)", str(error))
        return int(found[1]) if found else None


@given(
    st.one_of(st.lists(st.sampled_from(LINES), max_size=12), st.lists(st.sampled_from(["", "a\tO", "-DOCSTART-\tO"]))),
    *(st.booleans() for _ in range(2)),
    st.integers(1, 30),
)
@example(DOCUMENTS.split("\n"), False, False, 100)
@example(WINDOWS.split("\n"), False, False, 100)
@example(["a\tO", "", "", "", "b\tO", "", "", "c\tO"], True, False, 100)
@example(["a\tx\tO", "\tx\t"], True, False, 100)  # a line without word and tag is not empty
@example(["a\tO", "", "\ufeffb\tO"], True, False, 5)  # the second piece begins with a byte order mark
def test_blocks_are_read_as_line_by_line(tmp_path_factory, lines, newline_at_end, untagged, size):
    path = tmp_path_factory.mktemp("conll") / "words.conll"
    text = "\n".join([*lines, *[""] * newline_at_end])
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "BLOCK_BYTES", size)
        found, expected = read(path, untagged), line_by_line(text, untagged)
    assert found == expected


def test_a_malformed_conll_file_is_refused_with_its_line(tmp_path):
    malformed = r"line 2: it has 1 column \('rejects'\), and the first line has 2"
    for text, expected in (("EU B-ORG\nrejects\n", malformed), ("-DOCSTART- O\n\n", "has no words")):
        (tmp_path / "a.conll").write_text(text)
        with pytest.raises(UserError, match=f"^--train_file a .*{expected}"):
            [*read_conll(tmp_path / "a.conll", "--train_file a")]
