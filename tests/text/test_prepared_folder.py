"""A prepared folder has the same tokens here and behind a URL; what is damaged, missing or too small is one line."""

import errno
import json
import os
import shutil
from functools import partial

import numpy as np
import pytest
import runs
import torch
from filelock import FileLock
from range_server import RangeServer
from toy_data import WORDS, word_tokenizer
from transformers import PreTrainedTokenizerFast

from shared.cache.prepared import cache_dir
from shared.errors import UserError
from shared.plan.batches import Plan
from shared.plan.loading import Loader, feed
from shared.processes import folder_lock
from shared.text import prepared_folder, remote_tokens
from shared.text.corpus import of_files
from shared.text.masking import masking_for
from shared.text.prepared_folder import open_prepared, write_prepared
from shared.text.token_files import MaskedDocuments, tokenize_documents

TEXTS = [" ".join(WORDS[i * k % 8] for k in range(1 + i % 23)) for i in range(400)]
LENGTH = 10  # tokens of a piece
BLOCK = 64  # bytes
HEADER = 2  # blocks of a .npy file without tokens, which are never read


@pytest.fixture(scope="module", autouse=True)
def small_blocks(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(prepared_folder, "BLOCK_BYTES", BLOCK)
        yield


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n".join(TEXTS))
    return tokenize_documents(of_files([str(path)], "--train_file", "text"), word_tokenizer())


@pytest.fixture(scope="module")
def original(file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared") / "data"
    write(folder, file, file)
    return folder


@pytest.fixture
def folder(original, tmp_path, monkeypatch):
    """A copy of the folder, with a cache folder of its own."""
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(original, tmp_path / "data")


def opened(where, cache_gb=None):
    return open_prepared(str(where), cache_gb)[0]


def write(folder, *corpora, tokenizer=None):
    named = dict(zip(("training", "validation"), corpora, strict=False))
    write_prepared(folder, named, tokenizer or word_tokenizer(), ("wordpiece", 10))


def refusal(where, *args):
    return runs.refusal(lambda: everything(opened(where, *args)))


def full(*_, number=errno.ENOSPC):
    raise OSError(number, os.strerror(number))


def everything(found):
    return [corpus.tokens[:].tolist() for corpus in found]


def masked(corpus):
    masking = masking_for(word_tokenizer(), 0.3)
    return MaskedDocuments(corpus, corpus.documents("here"), LENGTH, ([], []), masking, 0)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


# The same data


def test_the_folder_has_the_tokens_of_the_corpus_here_and_behind_a_url(file, folder):
    with RangeServer(folder) as server:
        for where in (folder, server.url, f"file://{folder}"):
            corpora, index, here = open_prepared(str(where), None)
            assert [corpus.folder.name for corpus in corpora] == ["training", "validation"]
            assert index["trained"] == ["wordpiece", 10]
            for corpus in corpora:
                assert corpus.digest == file.digest
                assert corpus.offsets.tolist() == file.offsets.tolist()
                assert corpus.tokens.dtype == file.tokens.dtype
                for start, stop in ((0, None), (0, 1), (31, 33), (100, 500), (7, 7), (-1, None)):
                    assert corpus.tokens[start:stop].tolist() == file.tokens[start:stop].tolist()
    loaded = PreTrainedTokenizerFast.from_pretrained(here / "tokenizer")
    assert loaded.get_vocab() == word_tokenizer().get_vocab()


@pytest.mark.parametrize("share", [2, 0.25, 0], ids=["of everything", "smaller than an epoch", "of one block"])
def test_samples_are_the_same_with_any_cache_and_the_cache_is_bounded(file, folder, share, monkeypatch):
    local = masked(file)
    size = sum(path.stat().st_size for path in folder.glob("*/tokens.npy"))
    monkeypatch.setattr(remote_tokens, "MEMORY_BYTES", 0)
    with RangeServer(folder) as server:
        remote = masked(opened(server.url, share * size / 1e9)[0])
        assert remote.digest() == local.digest()
        rng = np.random.default_rng(0)
        for epoch in range(2):
            for samples in np.split(rng.permutation(len(local))[: len(local) // 8 * 8], len(local) // 8):
                epochs = np.full(len(samples), epoch)
                assert same(remote.read_micro_batch(samples, epochs), local.read_micro_batch(samples, epochs))
        requests = sum(count for path, count in server.requests.items() if path.startswith("training/tokens"))
    (cache,) = cache_dir().glob("blocks-*")
    blocks = sum(-(-path.stat().st_size // BLOCK) for path in folder.glob("*/tokens.npy"))
    assert cache.stat().st_size == BLOCK * max(1, min(blocks, int(share * size) // BLOCK))
    assert (requests == blocks // 2 - HEADER) == (share > 1), "with room for all, each block is requested once"


def test_a_second_start_reads_the_blocks_from_the_cache_and_repairs_it(file, folder):
    with RangeServer(folder) as server:
        whole = everything(opened(server.url))
        server.requests.clear()
        assert everything(opened(server.url)) == whole
        assert {*server.requests} == {"index.json"}
        (cache,) = cache_dir().glob("blocks-*")
        content = cache.read_bytes()
        middle = len(content) // 4
        cache.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert everything(opened(server.url)) == whole
        assert sum(server.requests.values()) == 3, "two indexes and the damaged block"
        server.requests.clear()
        assert everything(opened(server.url)) == whole
        assert {*server.requests} == {"index.json"}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_reads_ahead_with_and_without_workers(file, folder, num_workers):
    plan = Plan(num_samples=len(masked(file)), seed=3, global_batch_size=32, num_epochs=1, max_samples=8)

    def read(data, num_workers=0):
        loader = Loader(data, plan, lambda rows: rows, torch.device("cpu"), num_workers)
        found = [batch for step in range(3) for _, batch in loader.micro_batches(step)]
        loader.close()
        return found

    with RangeServer(folder) as server:
        data = masked(opened(server.url)[0])
        assert data[2].tolist() == masked(file)[2].tolist()  # starts the threads
        for one, other in zip(read(data, num_workers), read(masked(file)), strict=True):
            assert same(one, other)


def test_requests_for_coming_samples_begin_before_the_first_one_is_used(file, folder):
    with RangeServer(folder, delay=0.01) as server:
        data = masked(opened(server.url)[0])
        plan = Plan(num_samples=len(data), seed=3, global_batch_size=8, num_epochs=1)
        schedule = [m for step in range(20) for m in plan.micro_batches(step)]
        batches = feed(schedule, data, lambda rows: rows, torch.device("cpu"))
        next(batches)
        assert len(data.tokens._begun) > 100
        assert len([*batches]) == len(schedule) - 1


# Writing


def test_an_interrupted_copy_resumes_and_other_data_are_refused(file, folder, tmp_path):
    files = {path: path.stat().st_ino for path in folder.glob("*/*.npy")}
    index = (folder / "index.json").read_text()
    (folder / "index.json").unlink()
    cut = sorted(files)[0]
    runs.truncate(cut)
    write(folder, file, file)
    assert (folder / "index.json").read_text() == index
    kept = {path for path, inode in files.items() if path.stat().st_ino == inode}
    assert kept >= {*files} - {cut}
    assert not [*folder.glob("**/*.partial"), *folder.glob(".lock")]
    for corpora, tokenizer in (([file], None), ([file, file], word_tokenizer(("other",)))):
        with pytest.raises(UserError, match="data holds other prepared data: give another folder"):
            write(folder, *corpora, tokenizer=tokenizer)


def test_a_second_writer_and_a_full_disk_are_one_line(file, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(shutil, "copyfile", full)
    assert "cannot be written (No space left on device): free space" in runs.refusal(write, tmp_path, file)
    with FileLock(tmp_path / ".lock"), pytest.raises(UserError, match=r"--to .* is in use by another run"):
        write(tmp_path, file)


# Damage


def change_the_end(path):
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def with_format_1(path):
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))


@pytest.mark.parametrize(
    ("name", "damage", "here", "behind_url"),
    [
        ("index.json", os.remove, "python -m shared.prepare --to wrote", "/index.json does not exist: check the URL"),
        ("index.json", change_the_end, "index.json is damaged", "index.json is damaged"),
        ("index.json", with_format_1, "format 1, and this version reads 2", "has format 1"),
        ("training/offsets.npy", change_the_end, "/training/offsets.npy is missing or differs", "differs from its"),
        ("training/tokens.npy", os.remove, "tokens.npy is missing or differs", "does not exist"),
        ("training/tokens.npy", runs.truncate, "tokens.npy is missing or differs", "differs from its index"),
        ("training/tokens.npy", change_the_end, "tokens.npy is missing or differs", "differs from its index"),
    ],
)
def test_damage_is_one_line(folder, name, damage, here, behind_url, monkeypatch):
    monkeypatch.setattr(remote_tokens, "THREADS", 1)
    damage(folder / name)
    assert here in refusal(folder)
    with RangeServer(folder) as server:
        assert behind_url in refusal(server.url)


def test_an_index_cannot_name_a_file_outside_its_folder(folder):
    index = json.loads((folder / "index.json").read_text())
    del index["digest"]
    index["files"]["../../outside"] = [1, "0"]
    (folder / "index.json").write_text(json.dumps(index | {"digest": prepared_folder._digest_of_index(index)}))
    with RangeServer(folder) as server:
        assert "names ../../outside, a file outside its folder" in refusal(server.url)


def test_a_cache_without_effect_or_without_room_is_refused(folder, monkeypatch):
    assert refusal(folder, 4.0) == f"--cache_gb 4 has no effect on --prepared_data {folder}, a folder here: remove it"
    with RangeServer(folder) as server:
        opened(server.url, 3.9e-6)
        (cache,) = cache_dir().glob("blocks-*")
        size = cache.stat().st_size
        for number, problem in ((errno.ENOSPC, "No space left on device"), (errno.EROFS, "Read-only file system")):
            monkeypatch.setattr(os, "posix_fallocate", partial(full, number=number))
            expected = rf"^--cache_gb: {cache_dir()} has no room for .* GB .{problem}.: lower it"
            with pytest.raises(UserError, match=expected):
                opened(server.url, 1.0)
            assert cache.stat().st_size == size
            monkeypatch.setattr(os, "truncate", partial(full, number=errno.EROFS))
