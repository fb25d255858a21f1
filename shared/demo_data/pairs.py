"""The default pairs of texts: a function's docstring, and its source without the docstring."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def load() -> list[pa.Table]:
    """Training and validation tables with the string columns anchor (docstring), positive (source) and file.

    The rows are in a fixed random order, with at most 2,000 functions of each of four libraries. All functions of a
    source file are in the same table, and no text occurs twice.
    """
    file, columns = Path(__file__).with_suffix(".parquet"), ["anchor", "positive", "file"]
    parts = ("train", "validation")
    return [pq.read_table(file, columns=columns, filters=[("split", "==", part)]) for part in parts]
