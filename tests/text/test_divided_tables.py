"""All processes tokenize a large table together: the same files as one process writes, after any kill."""

import os
import signal

import pyarrow as pa
import pytest
import runs
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shared.cache import blocks, prepared
from shared.datasets.rows import FILL_IN, named
from shared.errors import UserError
from shared.text import table_texts
from shared.text.tokenized import tokenize

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
ROWS, BLOCK = 60, 7
TEXTS = {"text": [" ".join(WORDS[i * k % 8] for k in range(i % 11 + 1)) for i in range(ROWS)], "other": ["a b"] * ROWS}
TABLE = named(pa.table(TEXTS), "--train_file a.csv")
SMALL = {"UNDIVIDED_ROWS": 10, "BLOCK_ROWS": BLOCK, "BATCH_ROWS": 3}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
    for name, value in SMALL.items():
        monkeypatch.setattr(table_texts, name, value)
    monkeypatch.setattr("shared.text.tokenized.UNDIVIDED_ROWS", SMALL["UNDIVIDED_ROWS"])


def word_tokenizer(**settings):
    """A tokenizer without special tokens. "three" is unknown to it, and a text of "-" alone has no tokens."""
    vocabulary = {word: i for i, word in enumerate(["?", "[PAD]", *WORDS[:3], *WORDS[4:]])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    words.normalizer = normalizers.Replace("-", "")
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="[PAD]", **settings)


def tokens(table=TABLE, columns=("text",), types=False):
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return tokenize(table, columns, word_tokenizer(model_input_names=names if types else names[::2]), 8)


def content():
    """{path: bytes} of the folders of tokens in the cache; there is nothing unfinished beside them."""
    here = prepared.cache_dir()
    assert not [*here.glob("*.blocks-*"), *here.glob("*.partial-*")]
    return {str(path.relative_to(here)): path.read_bytes() for path in here.glob("tokens-*/*")}


def in_another_process(rank, cache, processes, table=TABLE, kill_at=None):
    """Tokenize in a forked process; it ends in the batch `kill_at`, like a process that the kernel kills."""
    os.environ |= {"ACCELERATE_RECIPES_CACHE": str(cache), "RANK": str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"LOCAL_WORLD_SIZE": "1000", "TOKENIZERS_PARALLELISM": "false"}
    for name, value in SMALL.items():
        setattr(table_texts, name, value)
    from shared.text import tokenized

    tokenized.UNDIVIDED_ROWS = SMALL["UNDIVIDED_ROWS"]
    encode, batches = table_texts.Encoder.encode, []

    def encode_or_die(encoder, batch):
        batches.append(batch)
        if len(batches) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(encoder, batch)

    table_texts.Encoder.encode = encode_or_die
    tokens(table)


def refused_in_another_process(rank, cache, processes, table):
    with pytest.raises(UserError) as refused:
        in_another_process(rank, cache, processes, table)
    (cache.parent / f"error-{rank}").write_text(str(refused.value))


@pytest.fixture(scope="module")
def undivided(tmp_path_factory):
    """The files of a table that one process tokenizes without blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("undivided")))
        patch.setattr("shared.text.tokenized.UNDIVIDED_ROWS", ROWS)
        patch.setattr(table_texts, "Blocks", lambda *_, **__: pytest.fail("a small table is divided"))
        tokens()
        return content()


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_any_number_of_processes_write_the_files_of_one(undivided, processes):
    runs.fork(in_another_process, (prepared.cache_dir(), processes), processes)
    assert content() == undivided
    assert {path.split("/")[1] for path in undivided} == {
        *("input_ids.npy", "lengths.npy", "offsets.npy", "unknown", prepared.RECORD),
    }


@pytest.mark.parametrize("parallel", ["true", "false"])
def test_pairs_with_token_types_have_the_files_of_one_process(monkeypatch, tmp_path, parallel):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
    digest = tokens(columns=("text", "other"), types=True).digest()
    divided = content()
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "another cache"))
    monkeypatch.setattr("shared.text.tokenized.UNDIVIDED_ROWS", ROWS)
    assert tokens(columns=("text", "other"), types=True).digest() == digest
    assert content() == divided
    assert [path for path in divided if path.endswith("token_type_ids.npy")]


def test_after_a_kill_only_the_missing_blocks_are_tokenized(undivided, monkeypatch):
    """A block has three batches, of 3, 3 and 1 rows, so the process is killed in its third block."""
    context = runs.begin_fork(in_another_process, (prepared.cache_dir(), 1, TABLE, 8), 1)
    context.processes[0].join(60)
    assert context.processes[0].exitcode == -signal.SIGKILL
    encode, rows = table_texts.Encoder.encode, []
    monkeypatch.setattr(table_texts.Encoder, "encode", lambda self, batch: rows.extend(batch) or encode(self, batch))
    tokens()
    assert sorted(rows) == sorted(TEXTS["text"][2 * BLOCK :])
    assert content() == undivided


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("-", "row 12 of --train_file a.csv has a text without tokens: remove the row"),
        (" ", f"row 12 of --train_file a.csv has no text in text (3 such rows): {FILL_IN}"),
    ],
)
def test_all_processes_name_the_first_bad_row(tmp_path, bad, message):
    """The second process begins with a later block, which has a bad row as well."""
    texts = [bad if i in (11, 30, 58) else text for i, text in enumerate(TEXTS["text"])]
    table = named(pa.table({"text": texts}), "--train_file a.csv")
    runs.fork(refused_in_another_process, (prepared.cache_dir(), 2, table), 2)
    assert [(tmp_path / f"error-{rank}").read_text() for rank in range(2)] == [message] * 2
    assert not [*prepared.cache_dir().glob("tokens-*/*.npy")]


def test_unknown_words_are_counted_over_all_blocks(undivided):
    (unknown,) = (data for path, data in undivided.items() if path.endswith("/unknown"))
    words = " ".join(" ".join(text.split()[:8]) for text in TEXTS["text"]).split()
    assert unknown.decode() == f"{words.count('three')} {len(words)}"


@pytest.mark.parametrize(
    ("parallel", "processes", "threads", "of_library"),
    [("true", 1, 2, None), ("true", 4, 2, "4"), ("true", 64, 1, "1"), ("false", 1, 1, None), ("false", 4, 1, "4")],
)
def test_the_processes_of_a_machine_share_its_cores(monkeypatch, parallel, processes, threads, of_library):
    pools = []

    class Pool(blocks.ThreadPoolExecutor):
        def __init__(self, count):
            pools.append(count)
            super().__init__(count)

    monkeypatch.setattr(blocks, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", parallel)
    tokens()
    assert pools == [threads]
    assert os.environ.get("RAYON_NUM_THREADS") == of_library
