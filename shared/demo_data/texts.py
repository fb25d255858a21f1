"""The default texts: docstrings of five Python libraries, of at least 80 characters, without duplicates."""

import pyarrow as pa

from shared.demo_data.embedded import in_splits, read


def load() -> tuple[pa.Table, pa.Table]:
    """Training and validation tables with the string columns text, label (the library) and file.

    The rows are in a fixed random order, with at most 2,000 texts per label. All texts of a source file are in the same
    table.
    """
    table = read("texts")
    return in_splits(table.filter(table["labeled"]).drop_columns(["labeled"]))


def documents() -> pa.Table:
    """All texts, for masked language modeling: the columns text, file and split ("train" or "validation")."""
    return read("texts").drop_columns(["label", "labeled"])
