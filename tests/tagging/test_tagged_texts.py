"""Tagged texts are read from CoNLL files, columns of lists, and spans of characters; bad input is one line."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import UserError
from shared.tagging.conll import read_conll
from shared.tagging.tagged_texts import read_files, tagged

SENTENCES = [["EU", "rejects", "call"], ["Peter", "Blackburn"]]
TAGS = [["B-ORG", "O", "O"], ["B-PER", "I-PER"]]
CONLL = {
    "tabs": "EU\tB-ORG\nrejects\tO\ncall\tO\n\nPeter\tB-PER\nBlackburn\tI-PER\n",
    "spaces": "EU B-ORG\nrejects O\ncall   O\n\nPeter B-PER\nBlackburn I-PER",
    "documents": "-DOCSTART- -X- O O\n\nEU NNP x B-ORG\nrejects VB x O\ncall NN x O\n\n\n-DOCSTART- -X- O O\n\n"
    "Peter NNP y B-PER\nBlackburn NNP y I-PER\n\n",
    "windows": "\ufeffEU B-ORG\r\nrejects O\r\ncall O\r\n\r\nPeter B-PER\r\nBlackburn I-PER\r\n",
}


def columns(table):
    return table["tokens"].to_pylist(), table["tags"].to_pylist()


def write(folder, rows, name="data.jsonl"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_files([str(folder / name)], "--train_file")


@pytest.mark.parametrize("form", CONLL)
def test_a_conll_file_is_read_in_all_its_forms(tmp_path, form):
    (tmp_path / "train.conll").write_bytes(CONLL[form].encode())
    assert columns(pa.concat_tables(read_conll(tmp_path / "train.conll", "train"))) == (SENTENCES, TAGS)


WORDS = st.text(st.characters(exclude_categories=("Cs", "Z", "C")), min_size=1, max_size=5)


@settings(max_examples=30)
@given(texts=st.lists(st.lists(st.tuples(WORDS, st.sampled_from(["O", "B-X"])), min_size=1, max_size=4), min_size=1))
def test_any_words_are_read_as_they_were_written(tmp_path_factory, texts):
    file = tmp_path_factory.mktemp("conll") / "a.conll"
    file.write_text("\n".join("".join(f"{word}\t{tag}\n" for word, tag in text) for text in texts), encoding="utf-8")
    assert columns(pa.concat_tables(read_conll(file, "a"))) == tuple(
        [[pair[i] for pair in text] for text in texts] for i in (0, 1)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EU B-ORG\nrejects\n", r"line 2: it has 1 column \('rejects'\), and the first line has 2"),
        ("EU\nrejects\n", "line 1: it has 1 column"),
        ("EU NNP B-ORG\nrejects O\n", "line 2: it has 2 columns"),
        ("EU\tB-ORG\nrejects\t\n", "line 2"),
        ("-DOCSTART- O\n\n", "has no words"),
        ("", "has no words"),
    ],
)
def test_a_malformed_conll_file_is_refused_with_its_line(tmp_path, text, expected):
    (tmp_path / "a.conll").write_text(text)
    with pytest.raises(UserError, match=expected) as caught:
        read_files([str(tmp_path / "a.conll")], "--train_file")
    assert str(caught.value).startswith(f"--train_file {tmp_path / 'a.conll'}")


def test_json_lines_parquet_conll_and_class_labels_give_the_same_table(tmp_path):
    names = ["O", "B-ORG", "B-PER", "I-PER"]
    numbers = [[names.index(tag) for tag in text] for text in TAGS]
    rows = [{"words": words, "ner": tags} for words, tags in zip(SENTENCES, TAGS, strict=True)]
    (tmp_path / "a.conll").write_text(CONLL["documents"])
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
        "row 2 of .* has 1 words in tokens and 0 tags in tags .*: write one",
    ),
    "column": (
        [{"tokens": ["a"], "ner_tags": ["O"]}],
        r"\(columns: tokens, ner_tags\): use --label_column_name ner_tags$",
    ),
    "case": ([{"tokens": ["a"], "Tags": ["O"]}], "use --label_column_name Tags"),
    "type": ([{"tokens": ["a"], "tags": "O"}], "--label_column_name tags: .* contains string, not lists of tags, or"),
    "words": ([{"tokens": 7, "tags": ["O"]}], "--text_column_name tokens: .* contains int64, not lists of words"),
    "text": ([{"tokens": "a b", "tags": ["O", "O"]}], "needs lists of spans {start, end, label}"),
    "spans": ([{"tokens": ["a"], "tags": [{"start": 0}]}], "lists of spans need a column of texts"),
    "missing": ([GOOD, {"tokens": None, "tags": ["O"]}], "row 2 of .* has no value in tokens"),
    "empty": ([{"tokens": [], "tags": []}, {"tokens": [" "], "tags": ["O"]}], "has no words in tokens"),
    "gap": ([GOOD, {"tokens": ["a", None], "tags": ["O", "O"]}], "row 2 of .* has an entry without a value in tokens"),
    "no tag": ([GOOD, {"tokens": ["a"], "tags": [""]}], "row 2 of .* has an entry without a value in tags"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_and_columns_are_refused_in_one_line(tmp_path, name):
    rows, expected = BAD[name]
    with pytest.raises(UserError, match=expected) as caught:
        tagged(write(tmp_path, rows * 2), "tokens", "tags")
    assert "\n" not in str(caught.value)


def test_rows_without_words_are_skipped_with_a_message_and_rows_keep_their_numbers(tmp_path, capsys):
    table = tagged(write(tmp_path, [{"tokens": [], "tags": []}, GOOD]), "tokens", "tags")
    assert columns(table) == ([GOOD["tokens"]], [GOOD["tags"]])
    assert "1 rows without words are skipped" in capsys.readouterr().err
    assert table["__row__"].to_pylist() == [1]
