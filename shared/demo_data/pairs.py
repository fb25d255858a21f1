"""The default pairs of texts: a function's docstring, and its source without the docstring."""

import pyarrow as pa

from shared.demo_data.embedded import in_splits, read


def load() -> tuple[pa.Table, pa.Table]:
    """Training and validation tables with the string columns anchor (docstring), positive (source) and file.

    The rows are in a fixed random order, with at most 2,000 functions of each of four libraries. All functions of a
    source file are in the same table, and no text occurs twice.
    """
    return in_splits(read("pairs"))
