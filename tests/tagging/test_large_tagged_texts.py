"""Large tagged texts: the data of small ones, in memory-mapped files."""

import numpy as np
import pytest
import runs
from large_data import in_both_ways
from predicting import write_jsonl
from toy_data import tagged_rows

from shared.cache import prepared
from shared.cache.prepared import mapped_file
from shared.config import options
from shared.datasets import readers, rows
from shared.tagging import pieces, tags

LARGE = {  # tables of any size are memory-mapped, and all blocks are small
    (rows, "IN_MEMORY"): -1,
    (readers, "BLOCK_BYTES"): 300,
    (rows, "BLOCK_ROWS"): 23,
    (prepared, "IN_MEMORY"): -1,
    (pieces, "SMALLEST_BLOCK"): 16,
    (tags, "BATCH_TEXTS"): 5,
    (tags, "BATCH_WORDS"): 60,
    (pieces, "BATCH_TEXTS"): 5,
}

pytestmark = pytest.mark.usefixtures("own_cache")


def test_large_texts_give_the_same_run_as_small_ones(tmp_path, capsys):
    recipe, messages, mapped = runs.load_recipe("token_classification"), [], []
    rows = [*tagged_rows(), {"tokens": [], "tags": []}]  # a row without words is skipped
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    flags = ["--max_length", "12", "--stride", "4", "--vocab_size", "400", "--max_train_samples", "40"]
    config = options.parse(recipe.Config, ["--train_file", str(path), *flags])

    def read():
        train, validation, tags, tokenizer = recipe.load_data(config)
        messages.append(capsys.readouterr().err)
        places = np.arange(len(train)), np.zeros(len(train), int)
        batch = [array.tolist() for array in train.read_micro_batch(*places) if array is not None]
        mapped.append(mapped_file(train.tags) is not None)
        return train.digest(), validation.digest(), batch, tags, tokenizer.get_vocab(), str(train)

    small, large = in_both_ways(read, LARGE)
    assert (mapped, small) == ([False, True], large)
    said = [[line for line in text.splitlines() if "train." in line and "%|" not in line] for text in messages]
    assert said[0] == said[1]
    assert any("held out" in line for line in said[0])
