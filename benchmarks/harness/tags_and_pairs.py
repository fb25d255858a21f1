"""Encoders and data for the benchmarks of token_classification.py and embeddings.py."""

import mailbox
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness.encoder_and_texts import write_bert
from benchmarks.harness.gpu_benchmarks import TEXT, TINY
from benchmarks.harness.launching import flag_words
from benchmarks.harness.peer_data import demo_tables

HELD_OUT = 16  # rows of the toy data to validate on


def toy_tables(recipe: str) -> tuple[pa.Table, pa.Table]:
    """About a hundred functions of a module of the standard library: tagged words, or docstrings and sources."""
    from shared.demo_data import pairs, tagged_functions

    source = Path(mailbox.__file__).read_bytes()
    tags = recipe == "token_classification"
    rows = tagged_functions.tagged_functions(source) if tags else pairs.functions(source)
    names = ("tokens", "tags") if tags else ("anchor", "positive")
    table = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    return table.slice(HELD_OUT), table.slice(0, HELD_OUT)


def prepare(recipe: str, folder: Path, toy: bool, max_length: int = 128) -> None:
    """Write the embedded texts of a recipe, BERT-base with random weights and without dropout, and its tokenizer.

    Args:
        recipe: "token_classification" or "embeddings".
        folder: where to.
        toy: few texts and a tiny model.
        max_length: tokens of a text or window.
    """
    import importlib

    import pyarrow.parquet as pq

    from shared.config import options
    from shared.pretrained.from_pretrained import head_for

    folder.mkdir(parents=True, exist_ok=True)
    train, validation = toy_tables(recipe) if toy else demo_tables(recipe)
    files = {"train_file": folder / "train.parquet", "validation_file": folder / "validation.parquet"}
    for file, table in zip(files.values(), (train, validation.slice(0, 256)), strict=True):
        pq.write_table(table, file)
    module = importlib.import_module(f"recipes.{recipe}")
    words = flag_words(files | {"max_length": max_length, "vocab_size": TEXT["vocab_size"] if toy else 8192})
    *loaded, tokenizer = module.load_data(options.parse(module.Config, words))
    kind, head = "BertModel", {}
    if recipe == "token_classification":
        kind, head = "BertForTokenClassification", head_for(loaded[-1].names)
    rows = -(-len(tokenizer) // 64) * 64
    write_bert(folder, tokenizer, kind, rows, **(TINY if toy else {}), **head, pad_token_id=tokenizer.pad_token_id)


def rows_of_words(data: Any) -> list[dict[str, Any]]:
    """The windows of `TaggedWords` as transformers' Trainer takes them; labels of tokens without a loss are -100."""
    rows = []
    for window in range(len(data)):
        tokens, _, places, tags = data.read_micro_batch(np.array([window]), np.zeros(1, np.int64))
        labels = np.full(len(tokens), -100)
        labels[places] = tags
        rows.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})
    return rows
