"""Samples of several texts: reading, digests, costs, packing and padding, pooling."""

import copy
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from predicting import write_csv, write_jsonl
from runs import load_recipe, refusal
from transformers import BertConfig, BertModel

from shared.contrastive.models import add_pooling
from shared.contrastive.tuples import load_tuples, of_columns, pack_or_pad_tuples, text_digests, tokenize_tuples
from shared.datasets import rows as rows_module
from shared.datasets.tables import read_file
from shared.encoders.packing import Packing
from shared.text.tokenized import Padding, Rows, train_tokenizer

COLUMNS = ("query", "answer", "other")


def config_of(**changed):
    """Those settings of the recipe, with short texts."""
    return load_recipe("embeddings").Config(**{"text_column_names": COLUMNS, "max_length": (16,)} | changed)


ROWS = [
    (f"question number {i % 7} about {'several ' * (i % 4)}things", f"answer {i} of many", f"wrong answer {i % 3}")
    for i in range(24)
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_csv(tmp_path_factory.mktemp("tuples") / "triplets.csv", COLUMNS, ROWS)


@pytest.fixture(scope="module")
def data(file):
    """(training data, validation data, tokenizer) of the file."""
    config = config_of(train_file=(str(file),))
    train, validation = load_tuples(config)
    tokenizer = train_tokenizer(train, COLUMNS[:2], "wordpiece", 200, 16)
    return *(tokenize_tuples(table, config, tokenizer) for table in (train, validation)), tokenizer


def test_scores_that_are_all_the_same_are_refused(tmp_path):
    columns = "anchor", "positive", "score"
    files = [write_csv(tmp_path / f"{n}.csv", columns, [("a", f"b {i}", i * n) for i in range(4)]) for n in (1, 0)]
    given = {"train_file": (str(files[0]),), "validation_file": (str(files[1]),)}
    config = config_of(**given, text_column_names=columns[:2], label_column_name="score")
    assert re.search(r"score: all rows of .*0\.csv have the same score", refusal(load_tuples, config))


def test_negatives_may_be_missing_in_validation_rows(tmp_path):
    csv = write_csv(tmp_path / "a.csv", COLUMNS, [*ROWS[:3], ("a", "b", "")])
    lists = [dict(zip(COLUMNS, ("q", "a", it), strict=True)) for it in (["x", "y"], ["z", "x"], ["y", "y"], ["y", " "])]
    for path in map(str, (csv, write_jsonl(tmp_path / "a.jsonl", lists))):
        config = config_of(train_file=(path,), validation_file=(path,), skip_incomplete_rows=True)
        assert [table.num_rows for table in load_tuples(config)] == [3, 4]


def test_a_micro_batch_has_all_anchors_then_all_positives_then_all_negatives(data):
    train, validation, tokenizer = data
    samples = np.array([5, 0, 3])
    expected = [train[i][column][0] for column in range(3) for i in samples]
    rows = lengths, tokens, types, targets, _ = train.read_micro_batch(samples, samples)
    assert tokens.tolist() == np.concatenate(expected).tolist()
    assert lengths.tolist() == train.text_lengths[samples].T.ravel().tolist() == list(map(len, expected))
    assert types is None
    batch = Padding(tokenizer.pad_token_id)(rows)
    assert batch["input_ids"].shape == (9, max(lengths))
    digests = [train.digests_of(column)[samples].tolist() for column in range(3)]
    assert batch["labels"].tolist() == targets.tolist() == digests
    assert train.digest() != validation.digest()


@settings(max_examples=30)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=20))
def test_texts_have_the_same_digest_exactly_if_they_have_the_same_tokens(texts):
    found = text_digests(np.concatenate(texts).astype(np.uint16), np.array(list(map(len, texts))))
    assert len(set(found.tolist())) == len(set(map(tuple, texts)))
    assert all((found[i] == found[j]) == (texts[i] == texts[j]) for i in range(len(texts)) for j in range(i))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_packed_and_padded_texts_have_the_embeddings_of_each_text_alone(data, pooling):
    train, _, tokenizer = data
    config = SimpleNamespace(activation_dtype=None, mixed_precision="no", max_length=(16,))
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    texts = [ids.astype(np.int64) for i in range(4) for ids, _, _ in train[i]]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain = BertModel(BertConfig(vocab_size=len(tokenizer), initializer_range=0.5, **sizes)).eval()
    with torch.no_grad():
        hidden = [plain(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0] for ids in texts]
        expected = torch.stack([each[0] if pooling == "cls" else each.mean(0) for each in hidden])
    for config.packing, batches in ((True, Packing), (False, Padding)):
        model = copy.deepcopy(plain)
        add_pooling(model, pooling)
        collate, described = pack_or_pad_tuples(model, train, tokenizer, accelerator, config)
        assert isinstance(collate, batches)
        assert ("packed" in described) == config.packing
        sizes = train.sizes(collate)
        costs = sizes.get("padded", np.asarray)(sizes["lengths"].astype(np.int64))
        assert costs.tolist() == [sum(each) if config.packing else 3 * max(each) for each in train.text_lengths]
        rows = Rows(np.array(list(map(len, texts))), np.concatenate(texts))
        assert torch.allclose(model(**collate(rows)).logits, expected, rtol=1e-5, atol=1e-5)


def test_an_encoder_decoder_is_refused():
    model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=True))
    assert "has an encoder and a decoder" in refusal(add_pooling, model, "mean")


@pytest.mark.parametrize("columns", [("query",), ("query", "answer", "query")])
def test_wrong_columns_are_refused_in_one_line(file, columns):
    message = f"--text_column_names {' '.join(columns)}: name two or more columns, each once"
    assert message in refusal(load_tuples, config_of(train_file=(str(file),), text_column_names=columns))


def write_lists(path, rows):
    """JSON lines of a query, an answer and a list of other texts; returns their table."""
    return read_file(str(write_jsonl(path, [dict(zip(COLUMNS, row, strict=True)) for row in rows])), "--train_file")


@pytest.mark.parametrize("mapped", [False, True])
def test_prompts_lengths_and_lists_give_the_tokens_of_the_texts_written_out(data, tmp_path, monkeypatch, mapped):
    *_, tokenizer = data
    if mapped:
        monkeypatch.setattr(rows_module, "IN_MEMORY", 0)
    rows = [(q, a, [n, n[::-1], f"{n} again"]) for q, a, n in ROWS]
    config = config_of(prompts=("question ", "", "wrong "), max_length=(5, 16, 9))
    found = tokenize_tuples(write_lists(tmp_path / "lists.jsonl", rows), config, tokenizer)
    assert found.names == ("query", "answer", "other 1", "other 2", "other 3")
    for i, (query, answer, others) in enumerate(rows):
        texts = [(f"question {query}", 5), (answer, 16), *((f"wrong {text}", 9) for text in others)]
        expected = [tokenizer(text, truncation=True, max_length=most)["input_ids"] for text, most in texts]
        assert [ids.tolist() for ids, _, _ in found[i]] == expected
    assert found.lengths.tolist() == [sum(map(len, (ids for ids, *_ in found[i]))) for i in range(len(found))]
    part = tokenize_tuples(write_lists(tmp_path / "lists.jsonl", rows), of_columns(config, COLUMNS[1:2]), tokenizer)
    assert part.columns[0].digest() == found.columns[1].digest()


@pytest.mark.parametrize(
    ("others", "changes", "message"),
    [
        ([["a", "b"], ["a"]], {}, "row 2 of .*lists.jsonl has 1 texts in other, and the first row has 2: give"),
        ([["a"], []], {}, "row 2 of .* has 0 texts in other, and the first row has 1"),
        ([None, ["a"]], {}, "row 1 of .* has no text in other: fill it in, or skip such rows with --skip_incomplete_"),
        ([[], []], {}, "row 1 of .* has 0 texts in other"),
        ([["a", "b"], ["a", " "]], {"prompts": ("", "", "x ")}, "row 2 of .* has no text in other 2: fill it in"),
        ([[1], [2]], {}, "--text_column_names other 1: this column of .* contains int64, not text"),
        ([["a"], ["b"]], {"max_length": (8, 8)}, "--max_length 8 8: give one for each of .*, 3 in all"),
        ([["a"], ["b"]], {"prompts": ("", "is it " * 9, "")}, "--max_length 16 leaves no room for text after the "),
        ([["a"], ["b"]], {"text_column_names": ("query", "other")}, "--text_column_names other: .* contains list<"),
    ],
)
def test_wrong_lists_prompts_and_lengths_are_refused_in_one_line(data, tmp_path, others, changes, message):
    table = write_lists(tmp_path / "lists.jsonl", [("question", "answer", each) for each in others])
    assert re.match(message, refusal(tokenize_tuples, table, config_of(**changes), data[2]))
