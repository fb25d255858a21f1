"""Texts are tokenized once per machine, exactly as by the tokenizer itself; tokenizers of new models are trained."""

import os

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import refusal
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    T5Config,
)

from shared.datasets.rows import FILL_IN
from shared.datasets.tables import named
from shared.text import encoder, tokenized
from shared.text.tokenized import Padding, Rows, TokenizedText, check_max_length, cut_off, tokenize, train_tokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Sphinx of black quartz, judge my vow!",
    "def forward(self, input_ids): return self.model(input_ids)",
    "Ünïcödé, 漢字 and 🤗 in one line\nand another.",
    "Tokenizers tokenize token by token: to, tok, toke.",
]
PAIRS = pa.table({"text": SENTENCES * 3, "other": [s for s in reversed(SENTENCES) for _ in range(3)]})


pytestmark = pytest.mark.usefixtures("own_cache")


def trained(kind: str = "wordpiece", vocab_size: int = 400, **settings_) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(PAIRS, ["text", "other"], kind, vocab_size, max_length=512)
    for name, value in settings_.items():
        setattr(tokenizer, name, value)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, PreTrainedTokenizerFast]:
    """Fast tokenizers with different settings, and a slow one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("cache")))
        return {
            "wordpiece": trained(),
            "bpe": trained("bpe"),
            "with types": trained(model_input_names=["input_ids", "token_type_ids", "attention_mask"]),
            "left": trained(truncation_side="left"),
            "special tokens in the text are text": trained(split_special_tokens=True),
            "slow": ByT5Tokenizer(),
        }


def items(data: TokenizedText) -> list[list[int]]:
    return [data[row][0].tolist() for row in range(len(data))]


# The tokens


KINDS = ["wordpiece", "bpe", "with types", "left", "special tokens in the text are text", "slow"]
SOME_TEXT = st.text(min_size=1, max_size=30).filter(str.strip) | st.sampled_from(["[SEP] a", "[MASK]", " b  "])


@given(kind=st.sampled_from(KINDS), pairs=st.lists(st.tuples(SOME_TEXT, SOME_TEXT), max_size=9), data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_of_any_text_are_those_of_the_tokenizer_itself(tokenizers, kind, pairs, data):
    max_length, count = data.draw(st.integers(4, 40)), data.draw(st.integers(1, 2))
    columns = [[*column] for column in zip(*pairs, *zip(SENTENCES, SENTENCES[::-1], strict=True), strict=True)][:count]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "BATCH_ROWS", 2)
        patch.setattr(tokenized, "BLOCK_ROWS", 3)
        found = tokenize(pa.table(columns, ["a", "b"][:count]), ["a", "b"][:count], tokenizers[kind], max_length)
    expected = tokenizers[kind](*columns, truncation=True, max_length=max_length)
    assert items(found) == expected["input_ids"]
    assert found.lengths.tolist() == list(map(len, expected["input_ids"]))
    types = [None if found[row][1] is None else found[row][1].tolist() for row in range(len(found))]
    assert types == expected.get("token_type_ids", [None] * len(found))


@pytest.mark.parametrize(("entries", "dtype"), [(65_536, np.uint16), (65_537, np.int32)])
def test_ids_are_stored_in_the_smallest_type_that_holds_them(entries, dtype):
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(entries)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    data = tokenize(pa.table({"text": [f"w1 w{entries - 1}"]}), ["text"], tokenizer, 9)
    assert (data[0][0].dtype, items(data)) == (dtype, [[1, entries - 1]])


# The cache


@pytest.mark.parametrize("type_", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_equal_content_of_any_type_is_tokenized_once_however_it_is_chunked(tokenizers, monkeypatch, type_):
    table = pa.table({"text": PAIRS["text"].combine_chunks().cast(type_)})
    first = tokenize(table, ["text"], tokenizers["bpe"], 20)
    assert items(first) == tokenizers["bpe"](PAIRS["text"].to_pylist(), truncation=True, max_length=20)["input_ids"]
    monkeypatch.setattr(encoder.Encoder, "encode", lambda *_: pytest.fail("tokenized again"))
    chunked = pa.concat_tables([PAIRS.slice(0, 1), PAIRS.slice(1, 6), PAIRS.slice(7)])
    renamed = pa.table({"sentence": chunked["text"], "more": chunked["other"]})
    assert tokenize(renamed, ["sentence"], tokenizers["bpe"], 20).folder == first.folder


def test_other_content_is_tokenized_again(tokenizers):
    one, shifted = trained(), pa.table({"text": ["ab", "c"], "other": ["c", "ab"]})
    before = one.backend_tokenizer.to_str()
    variants = [(PAIRS, ["text"], tokenizer, 20) for tokenizer in tokenizers.values()]
    variants += [(PAIRS, columns, one, 20) for columns in (["other"], ["text", "other"], ["other", "text"])]
    variants += [(table, ["text"], one, 20) for table in (PAIRS.slice(1), shifted, pa.table({"text": ["a", "bc"]}))]
    variants += [(PAIRS, ["text"], one, 21), (shifted, ["other"], one, 20)]
    assert len({tokenize(*variant).folder for variant in variants}) == len(variants)
    assert one.backend_tokenizer.to_str() == before, "the settings of the tokenizer are unchanged"


@given(samples=st.lists(st.integers(0, 14), min_size=1, max_size=8))
def test_rows_read_together_give_the_same_batch_as_single_items(tokenizers, samples):
    for columns, kind in ((["text", "other"], "with types"), (["text"], "bpe")):
        data = tokenize(PAIRS, columns, tokenizers[kind], 30).with_targets(np.arange(15) / 2)
        together = Padding(0)(data.read_micro_batch(np.array(samples), np.zeros(len(samples), np.int64)))
        one_by_one = Padding(0)([data[sample] for sample in samples])
        assert ("token_type_ids" in together) == (kind == "with types")
        torch.testing.assert_close(together, one_by_one, rtol=0, atol=0)


@given(
    rows=st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=40), min_size=1, max_size=8),
    multiple_of=st.sampled_from([1, 8]),
    max_length=st.none() | st.integers(40, 50),
    targets=st.sampled_from([None, np.arange(8), np.arange(8, dtype=np.float32) / 2, np.eye(8, 3, dtype=np.float32)]),
)
def test_a_batch_is_its_rows_padded_to_the_longest_with_its_targets_as_labels(rows, multiple_of, max_length, targets):
    labels = None if targets is None else targets[: len(rows)]
    tokens, lengths = np.concatenate(rows).astype(np.uint16), np.array([*map(len, rows)])
    padding = Padding(7, multiple_of, max_length)
    batch = padding(Rows(lengths, tokens, (tokens % 2).astype(np.uint8), labels))
    width = batch["input_ids"].shape[1]
    assert lengths.max() <= width < lengths.max() + multiple_of
    assert width % multiple_of == 0 or width == max_length
    assert width == padding.padded_lengths(lengths).max()
    expected = {"input_ids": [row + [7] * (width - len(row)) for row in rows]}
    expected["attention_mask"] = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    expected["token_type_ids"] = [[token % 2 for token in row] + [0] * (width - len(row)) for row in rows]
    if labels is not None:
        expected["labels"] = labels.tolist()
        assert batch["labels"].numpy().dtype == labels.dtype
    assert {tensor.dtype for name, tensor in batch.items() if name != "labels"} == {torch.int64}
    assert {name: tensor.tolist() for name, tensor in batch.items()} == expected


# The tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_training_gives_the_same_tokenizer_every_time(tmp_path, monkeypatch, kind):
    # With many merges of equal count, the library's own trainer gives a different WordPiece vocabulary each time.
    table = pa.table({"text": ["Wel come to the 🤗 Tok en izers libr ary.", "abcdefghij klmnopqrst uvwxyz"]})
    contents = set()
    for run in range(8):
        monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / str(run)))
        contents.add(train_tokenizer(table, ["text"], kind, 320, 64).backend_tokenizer.to_str())
    assert len(contents) == 1
    monkeypatch.setattr(tokenized, f"_train_{kind}", lambda *_: pytest.fail("trained again"))
    train_tokenizer(table, ["text"], kind, 320, 64)


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_trained_tokenizer_has_the_usual_tokens_and_templates_and_keeps_the_case(tokenizers, kind):
    tokenizer = tokenizers[kind]
    assert len(tokenizer) <= 400
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    assert [getattr(tokenizer, f"{name}_id") for name in names] == [0, 1, 2, 3, 4]
    assert tokenizer.model_max_length == 512
    single, pair = tokenizer("fox")["input_ids"], tokenizer("fox", "dog")["input_ids"]
    assert (single[0], single[-1]) == (2, 3)
    assert pair == single + tokenizer("dog")["input_ids"][1:]
    assert tokenizer("[MASK]", add_special_tokens=False)["input_ids"] == [4]
    ids = tokenizer(SENTENCES[0])["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" .", ".") == SENTENCES[0]
    assert tokenizer.tokenize("a ##b") != ["a", "##b"], "pieces inside words are no special tokens"
    assert set(tokenizer.backend_tokenizer.get_added_tokens_decoder()) <= set(range(5))
    assert refusal(train_tokenizer, PAIRS, ["text"], kind, 50, 64).startswith("--vocab_size 50 is too small: ")


# Invalid input


def texts_of(values, type_=None) -> pa.Table:
    return named(pa.table({"text": pa.array(values, type_), "label": [0] * len(values)}), "--train_file a.csv")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["sentence"], "--text_column_names sentence: --train_file a.csv has no such column (columns: text, label)"),
        (["text"] * 3, "--text_column_names text text text: use one column, or two columns for text pairs"),
        (["label"], "--text_column_names label: this column of --train_file a.csv contains int64, not text"),
    ],
)
def test_other_columns_than_one_or_two_of_text_are_refused(tokenizers, columns, message):
    assert refusal(tokenize, texts_of(["a"]), columns, tokenizers["bpe"], 9) == message


@pytest.mark.parametrize("bad", [None, "", " \n\t"])
@pytest.mark.parametrize("columns", [["text"], ["label_text", "text"]])
def test_the_first_row_without_text_is_named_whichever_block_is_written_first(tokenizers, monkeypatch, bad, columns):
    monkeypatch.setattr(tokenized, "BLOCK_ROWS", 2)
    monkeypatch.setenv("RANK", "1")  # begins with later blocks
    monkeypatch.setenv("WORLD_SIZE", "2")
    table = texts_of(["a", "b", bad, "c", bad]).append_column("label_text", pa.array(["x"] * 5))
    message = f"row 3 of --train_file a.csv has no text in text: {FILL_IN}"
    assert refusal(tokenize, table, columns, tokenizers["bpe"], 9) == message
    assert refusal(train_tokenizer, table, columns, "bpe", 300, 9) == message


def test_a_text_without_tokens_is_named_and_nothing_is_joined(own_cache, monkeypatch):
    monkeypatch.setattr(tokenized, "BLOCK_ROWS", 2)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    message = "row 4 of --train_file a.csv has a text without tokens: remove the row"
    assert refusal(tokenize, texts_of(["a", "a", "a", "b"]), ["text"], tokenizer, 9) == message
    assert not [*own_cache.glob("tokens-*/*.npy")]


@pytest.mark.parametrize(
    ("processes", "threads", "of_library"),
    [(1, 2, None), (4, 2, "4"), (64, 1, "1")],
)
def test_the_processes_of_a_machine_share_its_cores(tokenizers, monkeypatch, processes, threads, of_library):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    assert encoder.Encoder(tokenizers["bpe"], 9).threads == threads
    assert os.environ.get("RAYON_NUM_THREADS") == of_library


@pytest.mark.parametrize(("columns", "special"), [(["text"], 2), (["text", "text"], 3)])
def test_a_max_length_without_room_for_text_is_refused(tokenizers, columns, special):
    message = refusal(tokenize, texts_of(["a"]), columns, tokenizers["bpe"], special)
    assert message.startswith(f"--max_length {special} leaves no room for text with {special} special tokens")
    data = tokenize(texts_of(["a"]), columns, tokenizers["bpe"], special + 1)
    assert data.lengths.tolist() == [special + 1]
    assert [cut_off(data.lengths, special + n)[:6] for n in (1, 2)] == [" (100 ", ""]


@pytest.mark.parametrize("model_type", ["bert", "electra", "camembert", "esm", "mpnet", "roberta", "xlm-roberta"])
def test_the_longest_accepted_max_length_is_the_longest_that_the_model_can_read(model_type):
    config = AutoConfig.for_model(
        model_type, vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8,
        max_position_embeddings=12, pad_token_id=1,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    longest = 12 if model_type in ("bert", "electra") else 10  # the others never use positions 0 and 1
    check_max_length(longest, config)
    model(torch.full((1, longest), 5))
    message = refusal(check_max_length, longest + 1, config)
    assert message == f"--max_length {longest + 1} exceeds the model's {longest} positions: lower it"
    check_max_length(100_000, T5Config())  # has no positions
    tokenized.check_vocabulary(ByT5Tokenizer(), AutoConfig.for_model("canine"))  # has no vocabulary
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, longest + 1), 5))
