"""Encoders and data for the benchmarks of token_classification.py and embeddings.py."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.encoder_and_texts import write_bert
from benchmarks.harness.gpu_benchmarks import TEXT, TINY
from benchmarks.harness.launching import flag_words
from benchmarks.harness.peer_data import demo_tables

TOY_ROWS = 96  # to train on


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
    train, validation = demo_tables(recipe)
    if toy:
        train, validation = train.slice(0, TOY_ROWS), validation.slice(0, 16)
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
        _, tokens, _, tags, places = data.read_micro_batch(np.array([window]), np.zeros(1, np.int64))
        labels = np.full(len(tokens), -100)
        labels[places] = tags
        rows.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})
    return rows
