"""Write files of rows and read them as tables, and make tables with a column of labels, for tests."""

import json
import os
from functools import partial
from pathlib import Path

import large_data
import pyarrow as pa
import runs

from shared.cache.prepared import mapped_file
from shared.datasets import readers, rows
from shared.datasets.labels import Labels
from shared.datasets.rows import ROW_COLUMN, content_of, named, typed_column_of, where
from shared.datasets.tables import read_file, read_parts, split
from shared.demo_data import texts as demo_texts
from shared.options.data_options import DataOptions

LARGE = {(rows, "IN_MEMORY"): -1, (readers, "BLOCK_BYTES"): 64, (rows, "BLOCK_ROWS"): 7}
in_both_ways = partial(large_data.in_both_ways, large=LARGE)

ROWS = [{"text": "a, b", "label": 1}, {"text": 'says "no"\nand é', "label": 2}]


def load(text=("text",), label="label", problem_type=None, **flags):
    """Load the tables that these flags name."""
    config, embedded = options_of(flags), ("the embedded docstrings", demo_texts.load)
    return split(read_parts(config, text, [label], problem_type, embedded), config)


def options_of(flags) -> DataOptions:
    given = {name: str(v) if isinstance(v, os.PathLike) else v for name, v in flags.items()}
    return DataOptions(**{name: (v,) if "_file" in name and isinstance(v, str) else v for name, v in given.items()})


def loaded(label="label", problem_type=None, delimiter=None, **flags):
    """Read data as small and as large data: the labels, the targets and rows of both parts; or the error's message."""

    def read():
        columns = [label] if isinstance(label, str) else label
        config = options_of(flags)
        tables = read_parts(config, ["text"], columns, problem_type)
        labels = Labels.from_table(tables[0], label, problem_type, delimiter)
        tables = split(tables, config, labels.encode)
        targets = [labels.encode(table) for table in tables]
        is_mapped = {mapped_file(part) is not None for part in targets} | {bool(content_of(t)) for t in tables}
        assert is_mapped == {rows.IN_MEMORY < 0}
        schemas = [[(field, field.metadata) for field in table.schema] for table in tables]
        found = [(part.tolist(), part.dtype, where(table, 2)) for part, table in zip(targets, tables, strict=True)]
        return labels, found, schemas, [table.to_pylist() for table in tables]

    return in_both_ways(read)


def values(table):
    """The rows of a table; CSV columns become numbers if possible."""
    columns = {name: typed_column_of(table, name).to_pylist() for name in table.column_names if name != ROW_COLUMN}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def refusal(path: Path) -> str:
    """The one-line error of reading `path` as --train_file, without the flag and the path at its beginning."""
    message = runs.refusal(read_file, str(path), "--train_file")
    assert message.startswith(f"--train_file {path}")
    return message.removeprefix(f"--train_file {path}")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table_of(values, type_=None, source="--train_file a.csv") -> pa.Table:
    return named(pa.table({"label": pa.array(values, type_)}), source)


def class_labels(table: pa.Table, names: list[str], as_list: dict | None = None) -> pa.Table:
    """`table` with the metadata that `datasets` writes for a column of ClassLabels."""
    feature = {"names": names, "_type": "ClassLabel"}
    features = {"label": feature if as_list is None else {"feature": feature, **as_list}}
    return table.replace_schema_metadata(
        {**table.schema.metadata, b"huggingface": json.dumps({"info": {"features": features}})}
    )
