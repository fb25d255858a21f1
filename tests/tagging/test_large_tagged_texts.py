"""Large tagged texts: the data of small ones, in memory-mapped files."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import runs
from large_data import in_both_ways
from toy_data import tagged_rows

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


pytestmark = pytest.mark.usefixtures("own_cache")


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
    recipe, messages, mapped = runs.load_recipe("token_classification"), [], []
    config = options.parse(recipe.Config, [*write(tmp_path, form), "--max_train_samples", "40"])

    def read():
        train, validation, tags, tokenizer = recipe.load_data(config)
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
