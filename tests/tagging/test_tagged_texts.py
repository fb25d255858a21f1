"""Tagged texts are read from CoNLL files, columns of lists, and spans of characters; bad input is one line."""

import json
import re

import pyarrow as pa
import pyarrow.parquet
import pytest
from large_data import in_both_ways
from predicting import write_jsonl
from runs import load_recipe

from shared.datasets import readers
from shared.datasets import rows as rows_module
from shared.errors import UserError
from shared.tagging.tagged_texts import load_tagged, read_files, tagged

pytestmark = pytest.mark.usefixtures("own_cache")

LARGE = {(rows_module, "IN_MEMORY"): -1, (readers, "BLOCK_BYTES"): 300, (rows_module, "BLOCK_ROWS"): 23}
SENTENCES = [["EU", "rejects", "call"], ["Peter", "Blackburn"]]
TAGS = [["B-ORG", "O", "O"], ["B-PER", "I-PER"]]
GOOD, WITH_GAP = {"tokens": ["a", "b"], "tags": ["O", "B-X"]}, {"tokens": "a", "tags": [None]}
UNUSABLE = ".* has a span in tags that lacks a label, lies outside its text of [0-9]+ characters, contains no word, or "


def columns(table):
    return table["tokens"].to_pylist(), table["tags"].to_pylist()


def write(folder, rows):
    return read_files([str(write_jsonl(folder / "data.jsonl", rows))], "--train_file")


def test_json_lines_parquet_conll_and_class_labels_give_the_same_table_also_of_large_texts(tmp_path):
    names = ["O", "B-ORG", "B-PER", "I-PER"]
    numbers = [[names.index(tag) for tag in text] for text in TAGS]
    rows = [{"words": words, "ner": tags} for words, tags in zip(SENTENCES, TAGS, strict=True)]
    text = "EU x B-ORG\nrejects x O\ncall y O\n\nPeter x B-PER\nBlackburn x I-PER\n\n"
    (tmp_path / "a.conll").write_text(text * 20)
    feature = {"words": {}, "ner": {"feature": {"names": names, "_type": "ClassLabel"}, "_type": "List"}}
    metadata = {"huggingface": json.dumps({"info": {"features": feature}})}
    labeled = pa.table({"words": SENTENCES, "ner": numbers}).replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(pa.concat_tables([labeled] * 20), tmp_path / "a.parquet", row_group_size=9)

    def read():
        parquet, conll = (read_files([f"{tmp_path}/a.{kind}"], "--train_file") for kind in ("parquet", "conll"))
        tables = [tagged(table, "words", "ner") for table in (write(tmp_path, rows * 20), parquet)]
        return [columns(table) for table in (*tables, tagged(conll, "tokens", "tags"))]

    small, large = in_both_ways(read, LARGE)
    assert small == large == [(SENTENCES * 20, TAGS * 20)] * 3
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
    rows = [{"text": text, "spans": spans}, {"text": "हिन्दी here, cafe\u0301", "spans": []}]
    small, large = in_both_ways(lambda: columns(tagged(write(tmp_path, rows), "text", "spans")), LARGE)
    assert small == large
    words, tags = small
    pairs = [f"{word}/{tag}" for word, tag in zip(words[0], tags[0], strict=True) if tag != "O"]
    assert pairs == ["Ada/B-PER", "Lovelace/I-PER", "Babbage/B-PER", "in/B-LOC", "London/I-LOC"]
    assert (words[1], tags[1]) == (["हिन्दी", "here", ",", "cafe\u0301"], ["O"] * 4)
    assert "1 spans in the column spans begin or end inside a word" in capsys.readouterr().err
    feature = {"spans": {"feature": {"label": {"names": ["PER", "LOC"], "_type": "ClassLabel"}}, "_type": "List"}}
    numbered = pa.table({"text": ["Ada"], "spans": [[{"start": 0, "end": 3, "label": 1}]]})
    named = numbered.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": feature}})})
    assert [columns(tagged(each, "text", "spans"))[1] for each in (numbered, named)] == [[["B-1"]], [["B-LOC"]]]


def spans(*places):
    """A text with spans at these characters."""
    return {"tokens": "hello world", "tags": [{"start": start, "end": end, "label": "X"} for start, end in places]}


@pytest.mark.parametrize(
    ("good", "bad", "expected"),
    [
        (GOOD, {"tokens": ["a"], "tags": []}, "row 31 of .* has 1 words in tokens and 0 tags in tags: write one tag"),
        (GOOD, {"tokens": None, "tags": ["O"]}, "row 31 of .* has no value in tokens"),
        (GOOD, {"tokens": ["a", None], "tags": ["O", "O"]}, "row 31 of .* has an entry without a value in tokens"),
        (GOOD, {"tokens": ["a"], "tags": [""]}, "row 31 of .* has an entry without a value in tags"),
        (None, {"tokens": ["a"], "ner_tags": ["O"]}, r"--label_column_name tags: .* \(columns: tokens, ner_tags\)"),
        (None, {"tokens": ["a"], "tags": "O"}, "--label_column_name tags: .*cast"),
        (None, {"tokens": 7, "tags": ["O"]}, "--text_column_name tokens: .* contains int64, not lists of words"),
        (None, {"tokens": "a b", "tags": ["O", "O"]}, "need lists of spans {start, end, label}"),
        (None, {"tokens": ["a"], "tags": [{"start": 0}]}, "lists of words need lists of tags"),
        (None, {"tokens": [" "], "tags": ["O"]}, "has no words in tokens"),
        *((spans((0, 5)), spans(*bad), f"row 31 of {UNUSABLE}") for bad in ([(0, 50)], [(5, 6)], [(0, 5), (3, 11)])),
        *((None, bad, f"row 1 of {UNUSABLE}") for bad in (spans(("0", "5")), WITH_GAP)),
        (None, {"tokens": "a", "tags": {"start": [0], "end": [1], "label": ["X"]}}, "texts need lists of spans"),
    ],
)
def test_bad_rows_and_columns_are_refused_in_one_line_also_of_large_texts(tmp_path, good, bad, expected):
    rows = [good] * 30 * (good is not None) + [bad] * 2
    small, large = in_both_ways(lambda: tagged(write(tmp_path, rows), "tokens", "tags"), LARGE)
    assert small == large
    assert re.search(expected, small)


def test_tags_that_make_all_tags_plain_are_named(tmp_path, capsys):
    (tmp_path / "a.tsv").write_text("word\ttag\n" + "a\tB-X\nb\tO\n\n" * 9)
    load_tagged(load_recipe("token_classification").Config(train_file=(f"{tmp_path}/a.tsv",)))
    assert "a.tsv has tags of no scheme ('tag'), so all tags are plain: " in capsys.readouterr().err


def test_rows_without_words_are_skipped_with_a_message_and_rows_keep_their_numbers(tmp_path, capsys):
    table = tagged(write(tmp_path, [{"tokens": [], "tags": []}, GOOD]), "tokens", "tags")
    assert columns(table) == ([GOOD["tokens"]], [GOOD["tags"]])
    assert "1 rows without words are skipped" in capsys.readouterr().err
    assert table[rows_module.ROW_COLUMN].to_pylist() == [1]
