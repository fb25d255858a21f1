"""The default texts: docstrings of five Python libraries, of at least 80 characters, without duplicates.

The tables of this folder are real data, the same on every machine, and need no network. The column `split` of a file is
the same for all rows of a source file.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

FILE, PARTS = Path(__file__).with_suffix(".parquet"), ("train", "validation")


def load() -> list[pa.Table]:
    """Training and validation tables with the string columns text, label (the library) and file.

    The rows are in a fixed random order, with at most 2,000 texts per label. All texts of a source file are in the same
    table.
    """
    columns, labeled = ["text", "label", "file"], ("labeled", "==", True)
    return [pq.read_table(FILE, columns=columns, filters=[("split", "==", part), labeled]) for part in PARTS]


def documents() -> list[pa.Table]:
    """All texts, for masked language modeling: training and validation tables with the columns text and file."""
    return [pq.read_table(FILE, columns=["text", "file"], filters=[("split", "==", part)]) for part in PARTS]
