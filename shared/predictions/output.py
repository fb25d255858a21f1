"""Files of predictions: the columns of the input and those of the model, as CSV, JSON lines or Parquet."""

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from shared.datasets.rows import is_text

FORMATS = (".csv", ".jsonl", ".parquet")


def parts_folder(output: Path) -> Path:
    """The folder of the parts that are computed so far, beside the file of predictions."""
    return output.with_name(output.name + ".parts")


def record_file(output: Path) -> Path:
    """The JSON file that describes the predictions: model, input, settings and scores."""
    return output.with_name(output.name + ".json")


@contextmanager
def writer(file: Path, output: Path, schema: pa.Schema) -> Iterator[Callable[[pa.Table], object]]:
    """Open `file` in the format of `output`; gives a function that appends the rows of a table with this schema."""
    if output.suffix == ".parquet":
        with pyarrow.parquet.ParquetWriter(file, schema) as parquet:
            yield parquet.write_table
        return
    with file.open("w", encoding="utf-8", newline="") as stream:
        if output.suffix == ".jsonl":
            yield lambda table: stream.writelines(
                json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in plain(table).to_pylist()
            )
        else:
            rows = csv.writer(stream, lineterminator="\n")
            rows.writerow(schema.names)
            yield lambda table: rows.writerows(zip(*(texts(column) for column in table.columns), strict=True))


def plain(table: pa.Table) -> pa.Table:
    """`table` with float64 in place of float32: the number with the fewest digits that means the same float32."""
    for place, field in enumerate(table.schema):
        lists = is_any_list(field.type)
        if pa.types.is_float32(field.type.value_type if lists else field.type):
            text, number = (pa.large_list(type_) if lists else type_ for type_ in (pa.string(), pa.float64()))
            table = table.set_column(place, field.name, table.column(place).cast(text).cast(number))
    return table


def is_any_list(type_: pa.DataType) -> bool:
    """Whether an Arrow type is a list, of any or of a fixed length."""
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_))


def texts(column: pa.ChunkedArray) -> list[str]:
    """The cells of a column as text; the empty text for null."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    cells = column if is_text(column.type) else column.cast(pa.string())
    return pc.fill_null(cells.cast(pa.large_string()), "").to_pylist()
