"""Tagged texts are read from CoNLL files, columns of lists, and spans of characters; bad input is one line."""

import json
import re

import pyarrow as pa
import pyarrow.parquet
import pytest
from runs import refusal

from shared.errors import UserError
from shared.tagging.tagged_texts import read_files, tagged

SENTENCES = [["EU", "rejects", "call"], ["Peter", "Blackburn"]]
TAGS = [["B-ORG", "O", "O"], ["B-PER", "I-PER"]]


def columns(table):
    return table["tokens"].to_pylist(), table["tags"].to_pylist()


def write(folder, rows, name="data.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_files([str(folder / name)], "--train_file")


def test_json_lines_parquet_conll_and_class_labels_give_the_same_table(tmp_path):
    names = ["O", "B-ORG", "B-PER", "I-PER"]
    numbers = [[names.index(tag) for tag in text] for text in TAGS]
    rows = [{"words": words, "ner": tags} for words, tags in zip(SENTENCES, TAGS, strict=True)]
    (tmp_path / "a.conll").write_text("EU x B-ORG\nrejects x O\ncall y O\n\nPeter x B-PER\nBlackburn x I-PER\n")
    feature = {"words": {}, "ner": {"feature": {"names": names, "_type": "ClassLabel"}, "_type": "List"}}
    metadata = {"huggingface": json.dumps({"info": {"features": feature}})}
    labeled = pa.table({"words": SENTENCES, "ner": numbers}).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(labeled, tmp_path / "a.parquet")
    tables = [
        tagged(write(tmp_path, rows), "words", "ner"),
        tagged(read_files([str(tmp_path / "a.parquet")], "--train_file"), "words", "ner"),
        tagged(read_files([str(tmp_path / "a.conll")], "--train_file"), "tokens", "tags"),
    ]
    assert [columns(table) for table in tables] == [(SENTENCES, TAGS)] * 3
    broken = labeled.set_column(1, "ner", pa.array([[0, 1, 2], [3, -1]]))
    with pytest.raises(UserError, match=r"row 2 of the data has the tag -1 in ner, but its ClassLabel has names for 0"):
        tagged(broken, "words", "ner")


def test_spans_become_iob2_tags_of_words(tmp_path, capsys):
    text = "Dr. Ada Lovelace met Babbage-Smith, in London."
    spans = [
        {"start": 4, "end": 16, "label": "PER"},
        {"start": 22, "end": 28, "label": "PER"},  # "abbage": widened
        {"start": 35, "end": 45, "label": "LOC"},  # " in London": the white space does not matter
    ]
    table = write(tmp_path, [{"text": text, "spans": spans}, {"text": "Nothing here", "spans": []}])
    words, tags = columns(tagged(table, "text", "spans"))
    pairs = [f"{word}/{tag}" for word, tag in zip(words[0], tags[0], strict=True) if tag != "O"]
    assert pairs == ["Ada/B-PER", "Lovelace/I-PER", "Babbage/B-PER", "in/B-LOC", "London/I-LOC"]
    assert (words[1], tags[1]) == (["Nothing", "here"], ["O", "O"])
    assert "1 spans in the column spans begin or end inside a word" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 50)], "row 1 of .* that lies outside its text of 11 characters"),
        ([(3, 3)], "lies outside"),
        ([(5, 6)], "contains no word"),
        ([(0, 5), (3, 11)], "shares a word with another span"),
    ],
)
def test_a_span_that_does_not_fit_is_refused(tmp_path, spans, expected):
    rows = [{"text": "hello world", "spans": [{"start": s, "end": e, "label": "X"} for s, e in spans]}] * 2
    with pytest.raises(UserError, match=expected):
        tagged(write(tmp_path, rows), "text", "spans")


GOOD = {"tokens": ["a", "b"], "tags": ["O", "B-X"]}
BAD = {
    "lengths": (
        [GOOD, {"tokens": ["a"], "tags": []}],
        "row 2 of .* has 1 words in tokens and 0 tags in tags: write one",
    ),
    "column": ([{"tokens": ["a"], "ner_tags": ["O"]}], r"--label_column_name tags: .* \(columns: tokens, ner_tags\)"),
    "type": ([{"tokens": ["a"], "tags": "O"}], "--label_column_name tags: .*cast"),
    "words": ([{"tokens": 7, "tags": ["O"]}], "--text_column_name tokens: .* contains int64, not lists of words"),
    "text": ([{"tokens": "a b", "tags": ["O", "O"]}], "need lists of spans {start, end, label}"),
    "spans": ([{"tokens": ["a"], "tags": [{"start": 0}]}], "lists of words need lists of tags"),
    "missing": ([GOOD, {"tokens": None, "tags": ["O"]}], "row 2 of .* has no value in tokens"),
    "empty": ([{"tokens": [], "tags": []}, {"tokens": [" "], "tags": ["O"]}], "has no words in tokens"),
    "gap": ([GOOD, {"tokens": ["a", None], "tags": ["O", "O"]}], "row 2 of .* has an entry without a value in tokens"),
    "no tag": ([GOOD, {"tokens": ["a"], "tags": [""]}], "row 2 of .* has an entry without a value in tags"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_and_columns_are_refused_in_one_line(tmp_path, name):
    rows, expected = BAD[name]
    assert re.search(expected, refusal(tagged, write(tmp_path, rows * 2), "tokens", "tags"))


def test_rows_without_words_are_skipped_with_a_message_and_rows_keep_their_numbers(tmp_path, capsys):
    table = tagged(write(tmp_path, [{"tokens": [], "tags": []}, GOOD]), "tokens", "tags")
    assert columns(table) == ([GOOD["tokens"]], [GOOD["tags"]])
    assert "1 rows without words are skipped" in capsys.readouterr().err
    assert table["__row__"].to_pylist() == [1]
