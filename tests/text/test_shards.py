"""A corpus becomes the same shards with any number of processes, after any kill, and from any damage."""

import contextlib
import json
import os
import shutil
import signal
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import runs
from hypothesis import given
from hypothesis import strategies as st
from runs import truncate
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shared.cache import prepared
from shared.cache.prepared import Unfinished, only_task
from shared.datasets import documents as documents_module
from shared.datasets import files as files_module
from shared.datasets.documents import of_file, of_files
from shared.errors import UserError
from shared.text import shards as shards_module
from shared.text import token_files as tokens_module
from shared.text.shards import in_blocks
from shared.text.token_files import Tokens, tokenize_corpora, tokenize_documents

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven")
TEXTS = [" ".join(WORDS[i * k % 8] for k in range(i % 23)) for i in range(300)]  # one in 23 has no text
ROWS = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
FEW = 9  # documents in a small file
SMALL = {
    (documents_module, "PART_BYTES"): 2000,
    (documents_module, "BATCH_DOCUMENTS"): 10,
    (files_module, "BLOCK_BYTES"): 300,
    (shards_module, "BLOCK_CHARACTERS"): 900,
}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("cache")))
    for (module, name), value in SMALL.items():
        monkeypatch.setattr(module, name, value)


def word_tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["?", "[MASK]", *WORDS])}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", mask_token="[MASK]")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with a text file of many parts, JSON lines in one compressed part with many shards, and Parquet."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text(ROWS)
    (folder / "b.jsonl.zst").write_bytes(pa.compress(ROWS.encode(), codec="zstd", asbytes=True))
    for name in ("small-1.txt", "small-2.txt"):
        (folder / name).write_text("\n".join(TEXTS[:FEW]))
    pq.write_table(pa.table({"text": TEXTS}), folder / "c.parquet", row_group_size=50)
    return folder


def tokenize(corpus):
    """The token file of all files of the corpus."""
    return tokenize_documents(of_files([f"{corpus}/*.*"], "--train_file", "text"), word_tokenizer())


def content():
    """{path: bytes} of everything in the cache, except the digests of files, which know the path of the file."""
    here = prepared.cache_dir()
    files = [path for kind in ("shard-*/*", "corpus-*/*") for path in here.glob(kind)]
    return {str(path.relative_to(here)): path.read_bytes() for path in files}


def in_another_process(rank, corpus, cache, environment, patches=SMALL):
    """Tokenize the corpus in a forked process."""
    os.environ.update({"ACCELERATE_RECIPES_CACHE": str(cache)} | environment | {"RANK": str(rank)})
    for (module, name), value in patches.items():
        setattr(module, name, value)
    tokenize(corpus)


def killed_in_the_fourth_shard(_, corpus, cache):
    """Tokenize the corpus in a forked process, which ends like a process that the kernel kills."""
    write, shards = tokens_module._Encoder.write_shard, []

    def write_shard(encoder, folder, batches, count):
        shards.append(folder)
        if len(shards) == 4:
            (folder / "tokens").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(encoder, folder, batches, count)

    in_another_process(0, corpus, cache, {}, SMALL | {(tokens_module._Encoder, "write_shard"): write_shard})


@pytest.fixture(scope="module")
def alone(corpus, tmp_path_factory):
    """What one process writes, {path: bytes}, and its tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("alone")))
        for (module, name), value in SMALL.items():
            patch.setattr(module, name, value)
        file = tokenize(corpus)
        tokens = file.tokens[:]
        spans = [tokens[a:b].tolist() for a, b in zip(file.offsets[:-1], file.offsets[1:], strict=True)]
        return content(), spans


@pytest.fixture
def written(monkeypatch):
    """The names of the shards that are written from now on."""
    write, names = tokens_module._Encoder.write_shard, []

    def write_shard(encoder, folder, batches, count):
        names.append(folder.name.partition(".")[0])
        return write(encoder, folder, batches, count)

    monkeypatch.setattr(tokens_module._Encoder, "write_shard", write_shard)
    return names


# Blocks


@given(st.lists(st.lists(st.text("a", max_size=9) | st.none(), max_size=4), max_size=12), st.integers(1, 20), st.data())
def test_blocks_hold_each_document_once_whichever_are_read(batches, size, data):
    documents = [*chain.from_iterable(batches)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards_module, "BLOCK_CHARACTERS", size)
        blocks, last = [], []
        for block, is_last in in_blocks(iter(batches)):
            blocks.append([*chain.from_iterable(block)])
            last.append(is_last())
        chosen = data.draw(st.sets(st.integers(0, len(blocks) - 1)))
        some = {
            i: [*chain.from_iterable(block)] for i, (block, _) in enumerate(in_blocks(iter(batches))) if i in chosen
        }
        one_batch = [[*chain.from_iterable(block)] for block, _ in in_blocks(iter([documents]))]
    assert [*chain.from_iterable(blocks)] == documents
    for block in blocks[:-1]:
        assert sum(len(text or "") for text in block) >= size > sum(len(text or "") for text in block[:-1])
    assert last == [False] * (len(blocks) - 1) + [True]
    assert some == {i: blocks[i] for i in chosen}
    assert one_batch == blocks, "the cut does not depend on the batches"


# The same tokens


def test_the_tokens_are_those_of_the_documents_in_their_order(alone):
    tokenizer = word_tokenizer()
    expected = [tokenizer(text)["input_ids"] for text in [*TEXTS * 3, *TEXTS[:FEW] * 2] if text]
    assert alone[1] == expected
    names = {path.split("/")[0] for path in alone[0]}
    parts = {name.rpartition("-")[0] for name in names if name.startswith("shard-")}
    assert len(parts) > 12
    assert len(names) - 1 > len(parts) + 5, "several shards of the compressed file"


@pytest.mark.parametrize(("processes", "launched"), [(2, True), (3, False)], ids=["one launch", "several launches"])
def test_any_number_of_processes_write_the_same_bytes(corpus, alone, tmp_path, monkeypatch, processes, launched):
    """Processes of one launch know their rank; those of several launches do not."""
    environment = {"WORLD_SIZE": str(processes if launched else 1)}
    if launched:
        runs.fork(in_another_process, (corpus, tmp_path, environment), processes)
    else:
        runs.wait(runs.begin_fork(in_one_of_several_launches, (corpus, tmp_path), processes))
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path))
    assert content() == alone[0]
    assert not [*tmp_path.glob("*.partial-*")]


def in_one_of_several_launches(_, corpus, cache):
    in_another_process(0, corpus, cache, {})


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.zst"], ids=["many parts", "one long part"])
def test_a_shard_that_another_process_writes_is_left_to_it(corpus, alone, monkeypatch, name):
    """A second process starts while the first one writes its first shard. It writes all others and then waits.

    It leaves the rest of a short part to the first process. It reads a long part once, however long it waits.
    """
    write, order = tokens_module._Encoder.write_shard, []
    read, reads = documents_module._json_lines, []

    def counted(*given):
        reads.append(given)
        yield from read(*given)

    monkeypatch.setattr(documents_module, "_json_lines", counted)
    documents = of_file(corpus / name, "--train_file", "text")

    class Waits(Exception):
        """The second process waits for the first one."""

    def wait(_):
        raise Waits

    def write_shard(encoder, folder, batches, count):
        is_first = not order
        order.append(folder.name.partition(".")[0])
        if is_first:
            begun = len(reads)
            with pytest.raises(Waits):  # raised in the second process, which leaves its shards
                tokenize_documents(documents, word_tokenizer())
            assert name == "a.jsonl" or len(reads) == begun + 1
            order.append("end of the second process")
        return write(encoder, folder, batches, count)

    monkeypatch.setattr(prepared, "time", SimpleNamespace(sleep=wait))
    monkeypatch.setattr(tokens_module._Encoder, "write_shard", write_shard)
    tokenize_documents(documents, word_tokenizer())
    assert len(order) > 10
    assert len(order) == len({*order})
    rest = order[order.index("end of the second process") + 1 :]
    assert rest == ([order[0].removesuffix("0") + "1"] if name == "a.jsonl" else [])
    shards = {path: data for path, data in content().items() if path.startswith("shard-")}
    assert shards.items() <= alone[0].items()


# Interruptions and damage


def test_after_a_kill_only_the_missing_shards_are_written(corpus, alone, tmp_path, monkeypatch, written, capsys):
    context = runs.begin_fork(killed_in_the_fourth_shard, (corpus, tmp_path), 1)
    context.processes[0].join(60)
    assert context.processes[0].exitcode == -signal.SIGKILL
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path))
    before = content()
    there = {path.split("/")[0] for path in before if path.startswith("shard-") and ".partial-" not in path}
    assert len(there) == 3
    tokenize(corpus)
    assert "parts are already tokenized" in capsys.readouterr().err
    assert not there & {*written}
    assert content() == alone[0]


@pytest.mark.parametrize("damage", ["removed", "cut short", "changed", "no facts"])
def test_a_damaged_shard_is_written_again_and_no_other(corpus, alone, monkeypatch, written, capsys, damage):
    tokenize(corpus)
    shard = sorted(path for path in prepared.cache_dir().glob("shard-*/") if (path / "tokens").stat().st_size)[2]
    written.clear()
    if damage == "removed":
        shutil.rmtree(shard)
    elif damage == "cut short":
        truncate(shard / "tokens")
    elif damage == "changed":
        (shard / "tokens").write_bytes(b"\xff" + (shard / "tokens").read_bytes()[1:])
    else:
        (shard / "facts.json").unlink()
    capsys.readouterr()
    tokenize(corpus)
    assert written == [shard.name]
    assert content() == alone[0]
    found = capsys.readouterr().err
    assert ("is damaged or from an older version: building it again" in found) == (damage != "removed")
    assert "parts are already tokenized" in found


def test_after_the_correction_of_a_file_only_its_shards_are_written(corpus, tmp_path, written):
    for path in corpus.iterdir():
        shutil.copy(path, tmp_path)
    lines = ROWS.splitlines()
    (tmp_path / "z.jsonl").write_text("\n".join([*lines[:250], '{"text" "no colon"}', *lines[250:]]))
    with pytest.raises(UserError, match=r"z\.jsonl is malformed in line 251: "):
        tokenize(tmp_path)
    before = {*written}
    written.clear()
    (tmp_path / "z.jsonl").write_text("\n".join(["", *lines]))
    tokenize(tmp_path)
    assert len(before) > len(written) > 5
    assert not before & {*written}


def test_without_locks_between_machines_the_first_to_finish_wins(monkeypatch):
    class NoLock:
        """A lock of a file system that does not know those of other machines."""

        def __init__(self, _):
            pass

        def acquire(self, blocking):
            return contextlib.nullcontext()

    calls = []

    def build(folder):
        calls.append(folder)
        if len(calls) == 1:
            prepared.build_once("x", build)
        folder.mkdir(exist_ok=True)
        (folder / "a").write_text("content")

    monkeypatch.setattr(prepared, "FileLock", NoLock)
    assert (prepared.build_once("x", build) / "a").read_text() == "content"
    assert len(calls) == 2
    assert [path.name for path in prepared.cache_dir().iterdir()] == ["x"]


# Tasks of an array


def test_tasks_prepare_their_parts_and_the_last_one_finds_all(corpus, alone, written):
    for task in range(2):
        with only_task(task, 3), pytest.raises(Unfinished, match="parts are left to other tasks"):
            tokenize(corpus)
    assert not [path for path in content() if path.startswith("corpus-")]
    with only_task(2, 3):
        tokenize(corpus)
    assert content() == alone[0]
    assert len(written) == len({*written})


def test_a_task_without_parts_ends(corpus):
    with only_task(500, 501), pytest.raises(Unfinished):
        tokenize(corpus)
    assert content() == {}


# Reading


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.data())
def test_slices_of_tokens_are_those_of_one_array(tmp_path_factory, sizes, data):
    folder, tokens = tmp_path_factory.getbasetemp(), np.arange(sum(sizes), dtype=np.uint16)
    parts = np.split(tokens, np.cumsum(sizes)[:-1])
    files = [folder / f"tokens-{i}" for i in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        part.tofile(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens_module, "MOST_MAPPED", 2)
        found = Tokens(files, sizes, "uint16")
        assert len(found) == len(tokens)
        for _ in range(5):
            start, stop = data.draw(st.integers(0, len(tokens))), data.draw(st.integers(0, len(tokens)))
            assert found[start:stop].tolist() == tokens[start:stop].tolist()
            assert found[start:stop].dtype == np.uint16
        assert found[:].tolist() == tokens.tolist()
        assert len(found.mapped) <= 2


def test_two_corpora_are_tokenized_together_and_equal_parts_once(corpus, written):
    first = of_files([str(corpus / "a.jsonl")], "--train_file", "text")
    both = of_files([str(corpus / "a.jsonl"), str(corpus / "b.jsonl.zst")], "--validation_file", "text")
    one, two = tokenize_corpora([first, both], word_tokenizer())
    assert len(written) == len({*written})
    assert two.tokens[: len(one.tokens)].tolist() == one.tokens[:].tolist()
    assert len(two.tokens) == 2 * len(one.tokens)
    assert one.digest != two.digest
