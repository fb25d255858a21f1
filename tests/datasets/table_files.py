"""Write files of rows and read them as tables, for tests."""

import os
from pathlib import Path

import pytest

from shared.datasets.labels import embedded_docstrings
from shared.datasets.rows import ROW_COLUMN, typed_column_of
from shared.datasets.tables import load_tables, read_file
from shared.errors import UserError
from shared.options.data_options import DataOptions

ROWS = [{"text": "a, b", "label": 1}, {"text": 'says "no"\nand é', "label": 2}]


def load(text=("text",), label="label", problem_type=None, **flags):
    """Load the tables that these flags name."""
    return load_tables(
        DataOptions(**{name: str(v) if isinstance(v, os.PathLike) else v for name, v in flags.items()}),
        text,
        [label],
        problem_type,
        embedded=embedded_docstrings,
    )


def values(table):
    """The rows of a table; CSV columns become numbers if possible."""
    columns = {name: typed_column_of(table, name).to_pylist() for name in table.column_names if name != ROW_COLUMN}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def refusal(path: Path) -> str:
    """The one-line error of reading `path` as --train_file, without the flag and the path at its beginning."""
    with pytest.raises(UserError) as caught:
        read_file(str(path), "--train_file")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"--train_file {path}")
    return message.removeprefix(f"--train_file {path}")


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
