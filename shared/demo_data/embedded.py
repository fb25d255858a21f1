"""The tables of this folder: real data that are the same on every machine and need no network."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


def read(name: str) -> pa.Table:
    """The table NAME.parquet. Its column split is "train" or "validation", the same for all rows of a source file."""
    return pq.ParquetFile(Path(__file__).with_name(f"{name}.parquet")).read()


def in_splits(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The training and the validation rows, by the column split, which is left out."""
    parts = (table.filter(pc.equal(table["split"], part)) for part in ("train", "validation"))
    train, validation = (part.drop_columns(["split"]) for part in parts)
    return train, validation
