"""A corpus becomes a file of tokens: from any source, in little memory, keyed by content, without losing a token."""

import json
import os
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cache import prepared
from shared.datasets import documents as documents_module
from shared.datasets.documents import first_texts, load_documents, of_file, of_table
from shared.datasets.tables import named
from shared.errors import UserError
from shared.options.data_options import DataOptions
from shared.plan.batches import Plan
from shared.plan.loading import Loader
from shared.text import token_files as tokens_module
from shared.text.corpus import split_documents, tokenize_parts
from shared.text.masking import masking_for
from shared.text.pieces import Selection
from shared.text.token_files import (
    MaskedDocuments,
    Tokens,
    special_tokens_around,
    tokenize_documents,
)
from shared.text.tokenized import train_tokenizer

TEXTS = ["The first text.", "", "A second, longer one, with a comma\nand a line.", "   ", "Ünïcode — and [MASK] it is."]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path_factory.mktemp("cache")))


def table_of(texts, source="here"):
    return named(pa.table({"text": pa.array(texts, pa.string())}), source)


@pytest.fixture
def tokenizer():
    return train_tokenizer(table_of([text for text in TEXTS if text.strip()]), ("text",), "wordpiece", 200, 32)


def masked(file, tokenizer, max_length, documents=None, probability=0.3):
    around = special_tokens_around(tokenizer)
    documents = Selection() if documents is None else documents
    return MaskedDocuments(file, documents, max_length, around, masking_for(tokenizer, probability), 0)


def write(folder, kind):
    """Write TEXTS as a file of a kind; in a text file, documents have no line breaks."""
    path = folder / f"corpus.{kind}"
    table = pa.table({"id": range(len(TEXTS)), "text": TEXTS})
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind in ("csv", "tsv"):
        options = pa.csv.WriteOptions(delimiter="," if kind == "csv" else "\t")
        pa.csv.write_csv(table, path, options)
    elif kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, table.to_pylist())))
    elif kind == "json":
        path.write_text(json.dumps(table.to_pylist()))
    else:
        path.write_text("\n".join(text.replace("\n", " ") for text in TEXTS) + "\n")
    return str(path)


@pytest.mark.parametrize("kind", ["txt", "csv", "tsv", "jsonl", "json", "parquet"])
def test_every_kind_of_file_gives_its_texts(kind, tmp_path):
    found = of_file(write(tmp_path, kind), "--train_file", "text")
    expected = [text.replace("\n", " ") if kind == "txt" else text for text in TEXTS if text.strip()]
    for _ in range(2):  # a source can be read several times
        texts = [text for batch in found.batches() for text in batch]
        assert [text for text in texts if text and text.strip()] == expected


def test_the_end_of_a_line_is_not_part_of_a_document(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"\xef\xbb\xbfone \r\n\r\n two\tthree\nfour")
    assert [*of_file(str(tmp_path / "corpus.txt"), "--train_file", "text").batches()] == [
        ["one ", "", " two\tthree", "four"]
    ]


def test_tokens_are_those_of_each_text_and_a_written_mask_token_stays_text(tokenizer):
    file = tokenize_documents(of_table(table_of(TEXTS), "text"), tokenizer)
    assert file.tokens.dtype == np.uint16
    spans = [file.tokens[a:b].tolist() for a, b in zip(file.offsets[:-1], file.offsets[1:], strict=True)]
    real = [text for text in TEXTS if text.strip()]
    assert spans[:2] == [tokenizer(text, add_special_tokens=False)["input_ids"] for text in real[:2]]
    assert tokenizer.mask_token_id in tokenizer(real[2])["input_ids"]
    assert not set(tokenizer.all_special_ids) - {tokenizer.unk_token_id} & set(spans[2])


def test_documents_without_text_are_skipped_with_a_message(tokenizer, capsys):
    tokenize_documents(of_table(table_of(TEXTS), "text"), tokenizer)
    assert "here: 2 documents without text are skipped" in capsys.readouterr().err
    with pytest.raises(UserError, match="here contains no text"):
        tokenize_documents(of_table(table_of(["", " "]), "text"), tokenizer)


def test_large_vocabularies_are_stored_as_uint32(tokenizer, monkeypatch):
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda self: {"a": 0, "b": 1 << 16})
    assert tokenize_documents(of_table(table_of(["a b"]), "text"), tokenizer).tokens.dtype == np.uint32


def test_equal_content_is_not_tokenized_a_second_time(tokenizer, tmp_path, monkeypatch):
    path = write(tmp_path, "txt")
    first = tokenize_documents(of_file(path, "--train_file", "text"), tokenizer)
    copy = tmp_path / "copy.txt"
    copy.write_bytes((tmp_path / "corpus.txt").read_bytes())
    monkeypatch.setattr(tokens_module, "_in_order", None)  # from now on, tokenizing fails
    assert tokenize_documents(of_file(str(copy), "--train_file", "text"), tokenizer) == first
    assert tokenize_documents(of_file(path, "--train_file", "text"), tokenizer) == first
    copy.write_text(copy.read_text() + "more\n")
    with pytest.raises(TypeError):
        tokenize_documents(of_file(str(copy), "--train_file", "text"), tokenizer)


@pytest.mark.parametrize("replaced", [False, True], ids=["written over", "put in its place"])
def test_other_content_with_the_same_size_and_time_has_another_digest(tmp_path, replaced):
    """rsync -t and cp -p write such files."""
    path, other = tmp_path / "corpus.txt", tmp_path / "other.txt"
    path.write_text("one\n")
    before, digest = path.stat(), of_file(str(path), "--train_file", "text").content()
    assert of_file(str(path), "--train_file", "text").content() == digest
    time.sleep(0.05)  # the kernel's clock for file times has a resolution of a few milliseconds
    other.write_text("two\n")
    other.replace(path) if replaced else path.write_text("two\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert of_file(str(path), "--train_file", "text").content() != digest


def test_other_columns_of_a_file_may_change_their_type(tmp_path, monkeypatch):
    """A type inferred from the first block of a file need not hold for later blocks."""
    monkeypatch.setattr(documents_module, "BLOCK_BYTES", 200)
    rows = [f"{i},text {i}" for i in range(200)] + ["x,last"]
    (tmp_path / "corpus.csv").write_text("\n".join(["id,text", *rows]))
    texts = [
        text for batch in of_file(str(tmp_path / "corpus.csv"), "--train_file", "text").batches() for text in batch
    ]
    assert texts == [*(f"text {i}" for i in range(200)), "last"]


def test_files_of_a_killed_build_are_removed_and_a_build_is_synced_before_it_gets_its_name(monkeypatch):
    here = prepared.cache_dir()
    for name in ("corpus-a.partial-killed", "corpus-b.partial-under-way"):
        (here / name).mkdir(parents=True)
        (here / name / "tokens").write_text("half")
    order = []
    monkeypatch.setattr(prepared, "sync", lambda path: order.append((path.name, (here / "corpus-a").exists())))
    built = prepared.build_once("corpus-a", lambda folder: (folder / "tokens").write_text("whole"))
    assert (built / "tokens").read_text() == "whole"
    assert [path.name for path in here.iterdir() if "partial" in path.name] == ["corpus-b.partial-under-way"]
    assert sorted(order[:2]) == [("complete.json", False), ("tokens", False)]
    (folder, as_early), (parent, late) = order[2:]
    assert (as_early, parent, late) == (False, here.name, True)
    assert folder.startswith("corpus-a.partial-")


def test_a_failed_build_leaves_no_data(tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n{"text": 5}\n')
    with pytest.raises(UserError, match="in line 2, not text"):
        tokenize_documents(of_file(str(path), "--train_file", "text"), tokenizer)
    left = [p.name for p in documents_module.build_once("x", lambda _: None).parent.glob("corpus-*")]
    assert all(name.endswith(".lock") for name in left)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=20), st.integers(3, 40))
def test_pieces_hold_every_token_once_and_are_at_most_max_length(sizes, max_length):
    class File:
        tokens = Tokens([], [sum(sizes)], np.uint16)
        tokens.mapped[0] = np.arange(5, 5 + sum(sizes), dtype=np.uint16)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        digest = str(sizes)

    masker = tokens_module.Masking(0.3, 1.0, 0.0, 1, np.arange(5, 100))
    data = MaskedDocuments(File(), Selection(), max_length, ([2], [3]), masker, 0)
    pieces = [data[i] for i in range(len(data))]
    assert [len(piece) for piece in pieces] == data.lengths.tolist()
    assert data.lengths.max() <= max_length
    assert all(piece[0] == 2 and piece[-1] == 3 for piece in pieces)
    assert np.concatenate([piece[1:-1] for piece in pieces]).tolist() == File.tokens[:].tolist()
    assert len(data) == sum(-(-size // (max_length - 2)) for size in sizes)

    samples = np.random.default_rng(0).permutation(len(data))
    tokens, lengths, places, labels = data.read_micro_batch(samples, np.zeros(len(samples), int))
    assert lengths.tolist() == data.lengths[samples].tolist()
    restored = tokens.copy()
    restored[places] = labels
    assert restored.tolist() == np.concatenate([pieces[i] for i in samples]).tolist()
    assert (tokens[places] == 1).all()
    owner = np.repeat(np.arange(len(samples)), lengths)[places]
    assert np.bincount(owner, minlength=len(samples)).tolist() == data.masked[samples].tolist()


def test_two_epochs_mask_different_tokens_and_workers_mask_the_same(tokenizer, tmp_path):
    file = tokenize_documents(
        of_table(table_of([f"{i} {text}" for i in range(9) for text in TEXTS]), "text"), tokenizer
    )
    data = masked(file, tokenizer, 16)
    plan = Plan(
        lengths=data.lengths, weights=data.masked, packed=True, seed=0, global_batch_size=len(data), num_epochs=2
    )

    def read(workers):
        loader = Loader(data, plan, list, torch.device("cpu"), workers)
        return [[array.tolist() for array in batch] for step in range(2) for _, batch in loader.micro_batches(step)]

    alone = read(0)
    assert read(1) == alone
    assert sorted(alone[0][1]) == sorted(alone[1][1])
    assert alone[0][2] != alone[1][2]


def test_a_held_out_part_is_a_function_of_the_seed(tokenizer, capsys):
    documents = of_table(table_of([f"text {i}" for i in range(50)]), "text")
    file = tokenize_documents(documents, tokenizer)

    def numbers(seed):
        return [part.between(0, 50).tolist() for part in split_documents(file, documents.source, 10, seed)]

    train, held = numbers(0)
    assert sorted([*train, *held]) == list(range(50))
    assert len(held) == 5
    assert "5 of its documents (10 %, chosen by --seed 0)" in capsys.readouterr().err
    assert numbers(0)[1] == held
    assert numbers(1)[1] != held
    part = masked(file, tokenizer, 16, Selection(np.array(held), excluded=False))
    special = sum(map(len, special_tokens_around(tokenizer)))
    assert part.num_tokens - special * len(part) == np.diff(file.offsets)[held].sum()
    one = of_table(table_of(["alone"]), "text")
    with pytest.raises(UserError, match="one document"):
        split_documents(tokenize_documents(one, tokenizer), one.source, 10, 0)


def test_the_embedded_docstrings_are_over_five_megabytes_and_held_out_by_file(monkeypatch):
    monkeypatch.undo()  # the user's cache: gathering takes a while, and other tests have done it
    train, validation = load_documents(DataOptions(), "text")
    sizes = [sum(len(text) for batch in part.batches() for text in batch) for part in (train, validation)]
    assert sum(sizes) > 5e6
    assert 0.05 < sizes[1] / sum(sizes) < 0.3


def test_a_tokenizer_is_trained_on_the_first_texts_up_to_a_size():
    documents = of_table(table_of([f"text {i}" for i in range(5000)]), "text")
    assert first_texts(documents, 1 << 30).num_rows == 5000
    assert first_texts(documents, 10_000).num_rows == 2000, "whole batches"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("none.txt", None, "no such file"),
        ("empty.txt", b"", "is empty"),
        ("corpus.xyz", b"a", "unknown kind of file"),
        ("latin.txt", b"good\n\xe9t\xe9\n", "not UTF-8 (line 2)"),
        ("latin.jsonl", b'{"text": "\xe9"}\n', "not UTF-8 (line 1)"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "malformed in line 2: Expecting value at column"),
        ("list.jsonl", b'{"text": "a"}\n[1]\n', "malformed in line 2: not an object"),
        ("other.jsonl", b'{"words": "a"}\n', "no such column (columns: words)"),
        ("other.csv", b"id,words\n1,a\n", "no such column (columns: id, words)"),
        ("twice.csv", b"text,text\na,b\n", "two columns with the name text: rename one"),
        ("twice.tsv", b"id\tid\ttext\n1\t2\ta\n", "two columns with the name id: rename one"),
        ("ragged.csv", b"text,b\na,b\nc,d,e\n", "malformed"),
        ("zero.csv", b"text\n\0\n", "not text"),
        ("fake.parquet", b"nothing of the kind", "malformed"),
    ],
)
def test_files_that_cannot_be_read_are_refused_in_one_line(tokenizer, tmp_path, name, content, expected):
    if content is not None:
        (tmp_path / name).write_bytes(content)

    def read():
        tokenize_documents(of_file(str(tmp_path / name), "--train_file", "text"), tokenizer)

    with pytest.raises(UserError) as caught:
        read()
    message = str(caught.value)
    assert expected in message
    assert "\n" not in message
    assert "--train_file" in message or "--text_column_name" in message


def test_a_column_name_for_a_file_without_columns_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"--text_column_name words: .* has lines and no columns"):
        of_file(write(tmp_path, "txt"), "--train_file", "words")


def test_a_column_of_numbers_is_refused(tmp_path):
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "numbers.parquet")
    with pytest.raises(UserError, match="contains int64, not text"):
        of_file(str(tmp_path / "numbers.parquet"), "--train_file", "text")
    with pytest.raises(UserError, match="contains int64, not text"):
        of_table(pa.table({"text": [1, 2]}), "text")


IN_LITTLE_MEMORY = """
import resource, sys
import numpy as np, pyarrow.csv, pyarrow.parquet, torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from shared.plan.batches import Plan
from shared.datasets.documents import of_file
from shared.text.pieces import Selection
from shared.text.token_files import MaskedDocuments, tokenize_documents
from shared.plan.loading import Loader
from shared.text.masking import masking_for
from shared.encoders.packing import Packing

words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["?", "[MASK]", "one", "two"])}, unk_token="?"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", mask_token="[MASK]")
tokenizer("one two")
in_use = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()  # data and stack
limit = in_use + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # anonymous memory; maps of files are not counted
file = tokenize_documents(of_file(sys.argv[1], "--train_file", "text"), tokenizer)
data = MaskedDocuments(file, Selection(), 4096, ([], []), masking_for(tokenizer, 0.3), 0)
plan = Plan(lengths=data.lengths, weights=data.masked, packed=True, seed=0, global_batch_size=64, max_steps=3)
loader = Loader(data, plan, Packing(), torch.device("cpu"))
read = sum(batch["input_ids"].numel() for step in range(3) for _, batch in loader.micro_batches(step))
print(len(file.tokens), len(file.offsets) - 1, read)
"""


@pytest.mark.docs  # it starts a process without the modules of the others
@pytest.mark.parametrize("kind", ["txt", "parquet", "jsonl.zst"])
def test_a_corpus_larger_than_memory_is_tokenized_and_read(kind, tmp_path):
    """The process may use `memory` bytes more than its imports, and the text is larger."""
    memory = 96 << 20
    line, lines = "one two " * 60 + "x" * 7000, 16_000
    path = tmp_path / f"corpus.{kind}"
    if kind == "parquet":
        column = pa.array([line] * 100)
        with pq.ParquetWriter(path, pa.schema([("text", pa.string())]), use_dictionary=False, compression="none") as to:
            for _ in range(lines // 100):
                to.write_table(pa.table({"text": column}))
    elif kind == "txt":
        with path.open("w") as file:
            file.writelines(f"{line}\n" for _ in range(lines))
    else:
        with pa.CompressedOutputStream(path, "zstd") as file:
            for _ in range(lines):
                file.write(f'{{"text": "{line}"}}\n'.encode())
    assert lines * len(line) > 1.15 * memory
    out = runs.succeed([sys.executable, "-c", IN_LITTLE_MEMORY, path, memory], PYTHONPATH=str(runs.ROOT))
    assert out.splitlines()[-1].split()[:2] == [str(121 * lines), str(lines)], out


def test_a_limit_keeps_some_documents_of_each_part(tokenizer, tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("".join(f"text {i}\n" for i in range(50)))
    config = DataOptions(train_file=str(path), max_train_samples=7, max_eval_samples=2)
    (file, train), (_, held) = tokenize_parts(load_documents(config, "text"), tokenizer, config)
    everything = split_documents(file, f"--train_file {path}", 10, 0)
    for part, whole, count in ((train, everything[0], 7), (held, everything[1], 2)):
        chosen, among = part.between(0, 50), whole.between(0, 50)
        assert (len(chosen), {*chosen} - {*among}) == (count, set())
    two = DataOptions(train_file=str(path), validation_file=str(path), max_eval_samples=3)
    (_, train), (_, held) = tokenize_parts(load_documents(two, "text"), tokenizer, two)
    assert (train.count(50), held.count(50)) == (50, 3)
    with pytest.raises(UserError, match="documents without text are always skipped"):
        load_documents(DataOptions(skip_incomplete_rows=True), "text")
