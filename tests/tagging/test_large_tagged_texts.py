"""Large tagged texts: the digests and errors of small ones, in memory-mapped files of any number of processes."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import runs
from large_data import in_both_ways
from toy_data import tagged_rows, write_tagged

from shared.cache import prepared
from shared.cache.prepared import mapped_file
from shared.config import options
from shared.datasets import arrow_files, readers, rows
from shared.tagging import pieces, tags, windows

FLAGS = ["--max_length", "12", "--stride", "4", "--vocab_size", "400"]
LARGE = {  # tables of any size are memory-mapped, and all blocks are small
    (arrow_files, "IN_MEMORY"): -1,
    (readers, "BLOCK_BYTES"): 300,
    (rows, "BLOCK_ROWS"): 23,
    (prepared, "IN_MEMORY"): -1,
    (pieces, "SMALLEST_BLOCK"): 16,
    (tags, "BATCH_TEXTS"): 5,
    (tags, "BATCH_WORDS"): 60,
    (windows, "BATCH_TEXTS"): 5,
}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture
def large(monkeypatch):
    for (module, name), value in LARGE.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """The flags of 70 texts to train on and 30 to validate on."""
    return [*map(str, write_tagged(tmp_path_factory.mktemp("tagged"), tagged_rows())), *FLAGS]


def load(flags):
    recipe = runs.load_recipe("token_classification")
    return recipe.load_data(options.parse(recipe.Config, flags))


def as_spans(row):
    """A row of a text and its spans, each of one word."""
    starts = np.cumsum([0, *(len(word) + 1 for word in row["tokens"])]).tolist()
    places = [(start, start + len(word)) for start, word in zip(starts, row["tokens"], strict=False)]
    tagged = [(place, tag[2:]) for place, tag in zip(places, row["tags"], strict=True) if tag != "O"]
    found = [{"start": start, "end": end, "label": kind} for (start, end), kind in tagged]
    return {"text": " ".join(row["tokens"]), "spans": found}


def write(folder, form):
    """Write texts as a file of this form; return its flags."""
    texts = [row for row in tagged_rows() if all(re.fullmatch(r"\w+|[^\w\s]", word) for word in row["tokens"])]
    texts += [{"tokens": [], "tags": []}] * (form != "conll")  # a row without words, which is skipped
    path = folder / f"train.{'jsonl' if form == 'spans' else form}"
    if form == "conll":
        sentences = ("".join(f"{w}\t{t}\n" for w, t in zip(r["tokens"], r["tags"], strict=True)) for r in texts)
        path.write_text("\n".join(sentences))
    elif form == "parquet":
        pq.write_table(pa.Table.from_pylist(texts), path, row_group_size=9)
    else:
        texts = [as_spans(row) for row in texts] if form == "spans" else texts
        path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    columns = ["--text_column_name", "text", "--label_column_name", "spans"] * (form == "spans")
    return ["--train_file", str(path), *columns, *FLAGS]


@pytest.mark.parametrize("form", ["conll", "jsonl", "parquet", "spans"])
def test_large_texts_give_the_same_run_as_small_ones(tmp_path, capsys, form):
    given = [*write(tmp_path, form), "--max_train_samples", "40"]
    messages, mapped = [], []

    def read():
        train, validation, tags, tokenizer = load(given)
        messages.append(capsys.readouterr().err)
        places = np.arange(len(train)), np.zeros(len(train), int)
        batch = [array.tolist() for array in train.read_micro_batch(*places)]
        mapped.append(mapped_file(train.tags) is not None)
        return train.digest(), validation.digest(), batch, tags, tokenizer.get_vocab(), str(train)

    small, large = in_both_ways(read, LARGE)
    assert mapped == [False, True]
    assert small == large
    said = [[line for line in text.splitlines() if "train." in line and "%|" not in line] for text in messages]
    assert said[0] == said[1]
    assert any("held out" in line for line in said[0])


GOOD = {"tokens": ["a", "b"], "tags": ["O", "B-X"]}
BAD = {
    "unknown": [GOOD] * 20 + [{"tokens": ["b"], "tags": ["I-Z"]}] + [GOOD] * 20,
    "sizes": [GOOD] * 20 + [{"tokens": ["a"], "tags": []}] + [GOOD] * 20 + [{"tokens": ["a"], "tags": ["O", "O"]}],
    "gap": [GOOD] * 33 + [{"tokens": ["a", None], "tags": ["O", "O"]}],
    "empty": [{"tokens": [" "], "tags": ["O"]}] * 40,
    "span": [
        {"tokens": "hello you", "tags": [{"start": 0, "end": 5 + 9 * (i == 31), "label": "X"}]} for i in range(40)
    ],
}


@pytest.mark.parametrize("name", BAD)
def test_large_texts_are_refused_with_the_line_of_small_ones(tmp_path, name):
    for part, lines in (("train", [GOOD] * 20 if name == "unknown" else BAD[name]), ("validation", BAD[name])):
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    files = [f"--{part}_file={tmp_path}/{part}.jsonl" for part in ("train", "validation")]
    small, large = in_both_ways(lambda: load([*files, *FLAGS]), LARGE)
    assert re.search(r"row 21 of .* has the tag I-Z, .* \(known: B-X, O\)" if name == "unknown" else "", small)
    assert small == large


def content():
    """{path: bytes} of the cache; there is nothing unfinished in it."""
    here = prepared.cache_dir()
    assert not [*here.glob("*.blocks"), *here.glob("*.partial-*")]
    kinds = ("words-*/*", "array-*/*")
    return {str(path.relative_to(here)): path.read_bytes() for kind in kinds for path in here.glob(kind)}


def in_another_process(rank, flags, cache, processes):
    """Load the data in a forked process."""
    os.environ.update({"ACCELERATE_RECIPES_CACHE": str(cache), "RANK": str(rank), "WORLD_SIZE": str(processes)})
    for (module, name), value in LARGE.items():
        setattr(module, name, value)
    load(flags)


def test_two_processes_write_the_bytes_of_one(flags, large, tmp_path, monkeypatch):
    load(flags)
    alone = content()
    assert {Path(path).parts[0].split("-")[0] for path in alone} == {"words", "array"}
    runs.fork(in_another_process, (flags, tmp_path / "other", 2), 2)
    monkeypatch.setenv("ACCELERATE_RECIPES_CACHE", str(tmp_path / "other"))
    assert content() == alone
