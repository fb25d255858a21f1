"""Labeled texts larger than memory are read, split, tokenized and trained on; a second start reads no rows."""

import tracemalloc

import pyarrow as pa
import pytest
import torch

from shared.cache.prepared import mapped_file
from shared.datasets import label_columns, readers, rows
from shared.datasets.labels import Labels
from shared.datasets.rows import decided
from shared.datasets.tables import hold_out, read_file
from shared.plan.batches import Plan
from shared.plan.loading import Loader
from shared.text import encoder, tokenized
from shared.text.tokenized import Padding, tokenize, train_tokenizer


@pytest.fixture(autouse=True)
def always_mapped(monkeypatch, own_cache):
    """Tables of any size are memory-mapped."""
    monkeypatch.setattr(rows, "IN_MEMORY", -1)


@pytest.fixture
def large(monkeypatch, tmp_path):
    """A table of 50 texts in small blocks."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 256)
    path = tmp_path / "a.csv"
    path.write_text("text,label\n" + "".join(f"text {i},{i % 3}\n" for i in range(50)))
    return path


def prepared(path):
    """The tokens and targets of both parts, as a recipe loads them."""
    table = read_file(str(path), "--train_file")
    parts = hold_out(table, 10, 0, Labels.from_table(table, "label").encode(table))
    labels = Labels.from_table(parts[0], "label")
    tokenizer = train_tokenizer(parts[0], ["text"], "bpe", 300, 16)
    return [tokenize(part, ["text"], tokenizer, 16).with_targets(labels.encode(part)) for part in parts]


def test_a_second_start_reads_no_row(large, monkeypatch):
    first = prepared(large)
    digests = [part.digest() for part in first]
    for module, name in (
        *((rows, "_write"), (label_columns, "cells_of"), (rows, "reading_of")),
        *((tokenized, "batches_of_texts"), (tokenized.TokenizedText, "_digest")),
    ):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("read again"))
    monkeypatch.setattr(readers, "blocks", lambda *_, **__: pytest.fail("read again"))
    second = prepared(large)
    assert [part.digest() for part in second] == digests
    for one, other in zip(first, second, strict=True):
        assert one.folder == other.folder
        assert mapped_file(one.targets) == mapped_file(other.targets)


def test_the_memory_does_not_grow_with_the_rows(monkeypatch, tmp_path):
    """Peak of Arrow and of Python together, for files of 0.5 and 2 MB in blocks of 8 kB, until the first steps."""
    for module, name in ((readers, "BLOCK_BYTES"), (encoder, "BATCH_BYTES")):
        monkeypatch.setattr(module, name, 1 << 13)
    tokenizer = train_tokenizer(pa.table({"text": ["one two"]}), ["text"], "wordpiece", 300, 16)
    tokenize(pa.table({"text": ["one two"]}), ["text"], tokenizer, 16)  # imports

    def peak_of(rows):
        path = tmp_path / f"{rows}.csv"
        path.write_text("text,label\n" + "".join(f"one two {'x' * 990},{i % 2}\n" for i in range(rows)))
        pool, before = pa.proxy_memory_pool(pa.default_memory_pool()), pa.default_memory_pool()
        pa.set_memory_pool(pool)
        tracemalloc.start()
        try:
            table = decided(read_file(str(path), "--train_file"), "label", None)
            parts = hold_out(table, 10, 0, Labels.from_table(table, "label").encode(table))
            labels = Labels.from_table(parts[0], "label")
            for part in parts:
                data = tokenize(part, ["text"], tokenizer, 16).with_targets(labels.encode(part))
                data.digest()
                plan = Plan(lengths=data.lengths, seed=0, global_batch_size=16, max_steps=3)
                loader = Loader(data, plan, Padding(0), torch.device("cpu"))
                assert sum(len(batch["labels"]) for step in range(3) for _, batch in loader.micro_batches(step)) == 48
            return pool.max_memory() + tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            pa.set_memory_pool(before)

    few, many = peak_of(500), peak_of(2000)
    assert many < few + (1 << 18), "the further rows have 1.5 MB"


def test_long_texts_are_tokenized_few_at_a_time(monkeypatch):
    monkeypatch.setattr(encoder, "BATCH_BYTES", 100)
    table = pa.table({"a": ["x" * size for size in (30, 30, 30, 30, 250, 1, 1)], "b": ["y"] * 7})
    batches = [*encoder.batches_of_texts(table)]
    assert [len(batch) for batch in batches] == [3, 1, 3]
    assert [row for batch in batches for row in batch] == list(zip(*table.to_pydict().values(), strict=True))
