"""The data of the benchmark of token_classification.py, and of its peer."""

from benchmarks.harness import launching, tags_and_pairs
from recipes import token_classification
from shared.config import options
from shared.demo_data import tagged_functions


def test_trainer_gets_the_windows_of_the_recipe_with_a_label_at_the_first_token_of_each_word(tmp_path):
    table = tagged_functions.load()[0].slice(0, tags_and_pairs.TOY_ROWS)
    tags_and_pairs.prepare("token_classification", tmp_path, toy=True, max_length=48)
    files = {f"{part}_file": tmp_path / f"{part}.parquet" for part in ("train", "validation")}
    words = launching.flag_words(files | {"model_name_or_path": tmp_path, "max_length": 48})
    train, _, tags, tokenizer = token_classification.load_data(options.parse(token_classification.Config, words))
    rows = tags_and_pairs.rows_of_words(train)
    assert len(rows) == len(train) > len(table)
    labels = [label for row in rows for label in row["labels"] if label != -100]
    assert [tags.names[label] for label in labels] == [tag for text in table["tags"].to_pylist() for tag in text]
    row = rows[0]
    first = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    ids = [tokenizer.encode(word, add_special_tokens=False)[0] for word in table["tokens"][0].as_py()]
    assert first == ids[: len(first)]
    assert max(len(row["input_ids"]) for row in rows) == 48
