"""Where rows come from: the embedded docstrings, a user's files, a `save_to_disk` folder, the Hub; as Arrow tables.

A table carries where it came from (`named`), so that an error about a row names its file and its number there.
"""

import codecs
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from shared.batches import hash64
from shared.datasets.splits import share_of_each
from shared.errors import UserError
from shared.hub import require_hub

SOURCE_KEY = b"accelerate_recipes.source"  # in the schema's metadata
ROW_COLUMN = "__row__"  # the number of a row in its source, where that is not its place in the table
VALIDATION_SPLITS = ("validation", "validation_matched", "test")  # the first that there is; the second: MNLI
BLOCK_BYTES = 1 << 24  # Arrow's readers refuse a row that is longer than a block
EMBEDDED = "leave out --dataset_name to train on the embedded docstrings, or give --train_file"


def load_tables(
    *,
    dataset_name: str | None,
    dataset_config_name: str | None,
    train_file: str | None,
    validation_file: str | None,
    validation_split_percentage: int = 10,
    seed: int = 0,
    targets_of: Callable[[pa.Table], np.ndarray] | None = None,
) -> tuple[pa.Table, pa.Table]:
    """The training and the validation rows; without a data set and without files, the embedded docstrings.

    A source without a validation part gives `validation_split_percentage` of its rows, chosen by `seed`, and says so:
    of each label where `targets_of` gives labels (see `split_off`). The other arguments are settings that
    `options.check` has passed. Raises UserError for data that cannot be read.
    """
    if dataset_config_name and dataset_name and Path(dataset_name).is_dir():
        raise UserError(f"--dataset_config_name {dataset_config_name} has a meaning only for a data set of the Hub")

    validation: pa.Table | None = None
    if train_file:
        train = read_file(train_file, "--train_file")
        validation = read_file(validation_file, "--validation_file") if validation_file else None
    elif dataset_name:
        train, validation = read_dataset(dataset_name, dataset_config_name)
    else:
        from shared.datasets import docstrings

        train, validation = docstrings.load()
        train, validation = named(train, "the embedded docstrings"), named(validation, "the embedded docstrings")
    if validation is None:
        targets = targets_of(train) if targets_of else None
        each = "" if targets is None or _are_numbers(targets) else " of each label"
        train, validation = split_off(train, validation_split_percentage, seed, targets)
        if os.environ.get("RANK", "0") == "0":  # every process comes here, one speaks
            print(
                f"{source_of(train)} has no validation part: {validation.num_rows:,} of its rows "
                f"({validation_split_percentage} %{each}, chosen by --seed {seed}) are kept for it",
                file=sys.stderr,
            )
    return train, validation


def read_dataset(name: str, config_name: str | None) -> tuple[pa.Table, pa.Table | None]:
    """The training and the validation rows of --dataset_name: a `save_to_disk` folder, or a data set of the Hub.

    Without a validation split its test split serves as one, which is said; without either there is None.

    Raises:
        UserError: it cannot be read, or has no train split.
    """
    parts = read_saved(name) if Path(name).is_dir() else read_hub(name, config_name)
    if "train" not in parts:
        raise UserError(f"--dataset_name {name} has no train split (splits: {', '.join(parts)})")
    split = next((split for split in VALIDATION_SPLITS if split in parts), None)
    if split == "test" and os.environ.get("RANK", "0") == "0":  # every process comes here, one speaks
        print(
            f"--dataset_name {name} has no validation split: its test split serves as one, so what is chosen by its "
            "scores is chosen on test data",
            file=sys.stderr,
        )
    return parts["train"], parts[split] if split else None


def split_off(
    table: pa.Table, percentage: int, seed: int, targets: np.ndarray | None = None
) -> tuple[pa.Table, pa.Table]:
    """`table` without `percentage` of its rows, and those rows; both keep the order and remember their row numbers.

    Which rows is a function of (seed, row, number of rows) alone, and of the `targets` where these are labels, int [N]
    or [N, labels] of 0 and 1: see `share_of_each`. Each part gets at least one row.

    Raises:
        UserError: there is one row, or each row is the only one of a label.
    """
    rows = table.num_rows
    if rows < 2:
        raise UserError(f"{source_of(table)} has one row: too few to train on and to validate")
    order = np.argsort(hash64(seed, np.arange(rows, dtype=np.uint64)), kind="stable")
    held_out = np.zeros(rows, bool)
    if targets is None or _are_numbers(targets):
        held_out[order[: min(max(1, round(rows * percentage / 100)), rows - 1)]] = True
    else:
        held_out = share_of_each(targets, percentage, seed)
        if not held_out.any():
            several = share_of_each(targets, 100, seed)  # the rows that are not the last of a label
            if not several.any():
                raise UserError(
                    f"{source_of(table)} has one row of each label, so none can be held out: give --validation_file, "
                    "or more rows"
                )
            held_out[order[several[order]][0]] = True
    table = table.append_column(ROW_COLUMN, pa.array(np.arange(rows)))
    # filter and not take: take joins the chunks of a column, which overflows beyond 2 GiB of text.
    return table.filter(pa.array(~held_out)), table.filter(pa.array(held_out))


def _are_numbers(targets: np.ndarray) -> bool:
    """Whether targets are numbers to be predicted, and no labels."""
    return targets.ndim == 1 and targets.dtype.kind == "f"


def named(table: pa.Table, source: str) -> pa.Table:
    """`table`, knowing that it came from `source` ("--train_file reviews.csv"); other metadata are kept."""
    return table.replace_schema_metadata({**(table.schema.metadata or {}), SOURCE_KEY: source.encode()})


def source_of(table: pa.Table) -> str:
    """What `named` said, or "the data"."""
    return (table.schema.metadata or {}).get(SOURCE_KEY, b"the data").decode()


def where(table: pa.Table, row: int) -> str:
    """How to speak to the user about row number `row` (from 0) of `table`: its number in its source, from 1."""
    if ROW_COLUMN in table.column_names:
        row = table[ROW_COLUMN][row].as_py()
    return f"row {row + 1:,} of {source_of(table)}"


def column_of(table: pa.Table, name: str, flag: str) -> pa.ChunkedArray:
    """The column `name`, its dictionary encoding undone; UserError, with `flag` and the columns, if there is none."""
    if name not in table.column_names:
        columns = ", ".join(column for column in table.column_names if column != ROW_COLUMN)
        raise UserError(f"{flag} {name}: {source_of(table)} has no such column (columns: {columns})")
    column = table[name]
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def read_saved(path: str) -> dict[str, pa.Table]:
    """The splits of a folder written by `datasets.save_to_disk`; a single Dataset is the split "train"."""
    datasets = _import_datasets(path)
    try:
        saved = datasets.load_from_disk(path)
        parts = saved if isinstance(saved, dict) else {"train": saved}
        return {split: _to_table(part, f"--dataset_name {path} (split {split})") for split, part in parts.items()}
    except (OSError, ValueError, LookupError) as error:  # Arrow's errors are ValueErrors
        raise UserError(
            f"--dataset_name {path} is a folder, but not one that datasets' save_to_disk wrote ({_line(error)}): "
            "give such a folder, or a file as --train_file"
        ) from None


def read_hub(name: str, config_name: str | None) -> dict[str, pa.Table]:
    """All splits of a data set of the Hub: from the local cache if they are there, else after one try to connect."""
    if Path(name).exists():
        raise UserError(f"--dataset_name {name} is a file: give it as --train_file")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"--dataset_name {name}: no such folder")
    datasets = _import_datasets(name)
    from datasets.packaged_modules.cache.cache import Cache  # what load_dataset falls back to after 24 s of retries

    given = f"{name} --dataset_config_name {config_name}" if config_name else name
    try:
        short_name = name.rpartition("/")[2]
        cache = Cache(repo_id=name, dataset_name=short_name, config_name=config_name, version="auto", hash="auto")
        parts = cache.as_dataset()
    except (OSError, ValueError):  # not there, or several configs and none chosen
        require_hub("--dataset_name", given, EMBEDDED)
        try:
            parts = datasets.load_dataset(name, config_name)
        except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
            raise UserError(f"--dataset_name {given} cannot be loaded: {_line(error)}") from None
    return {split: _to_table(part, f"--dataset_name {name} (split {split})") for split, part in parts.items()}


def _import_datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"--dataset_name {name} needs the package datasets: pip install datasets") from None
    return datasets


def _to_table(dataset: Any, source: str) -> pa.Table:
    """The rows of a `datasets.Dataset`, still memory-mapped, with the features (label names) in the metadata."""
    if len(dataset) == 0:
        raise UserError(f"{source} has no rows")
    return named(dataset.with_format("arrow")[:], source)


def read_file(path: str, flag: str) -> pa.Table:
    """The rows of a .csv, .tsv, .json, .jsonl or .parquet file; UserError naming `flag` if it cannot be read."""
    source = f"{flag} {path}"
    read = READERS.get(Path(path).suffix.lower())
    try:
        with Path(path).open("rb") as file:
            if read is None:
                raise UserError(f"{source}: unknown kind of file, known are {', '.join(READERS)}")
            data = file.read()
    except FileNotFoundError:
        raise UserError(f"{source}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{source} is a folder: give a file ({', '.join(READERS)})") from None
    except OSError as error:
        raise UserError(f"{source} cannot be read: {error.strerror}") from None
    if not data or data.isspace():
        raise UserError(f"{source} is empty")
    try:
        table = read(data, source)
    except pa.ArrowException as error:
        raise UserError(f"{source} is malformed: {_line(error)}") from None
    if table.num_rows == 0:
        raise UserError(f"{source} has no rows")
    refuse_repeated(table.column_names, source)
    return named(table, source)


def read_parquet(file: Any) -> pa.Table:
    """What `pyarrow.parquet.read_table` gives, without its import of pyarrow.dataset and pandas, 0.3 s at a start."""
    return pyarrow.parquet.ParquetFile(file).read()


def refuse_repeated(names: list[str], source: str) -> None:
    """UserError when two columns have the same name."""
    if repeated := {name for name in names if names.count(name) > 1}:
        raise UserError(f"{source} has two columns of the name {min(repeated)}: rename one")


def _read_separated(data: bytes, source: str, separator: str) -> pa.Table:
    _refuse_non_utf8(data, source)
    options = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)

    def read(use_threads: bool) -> pa.Table:
        blocks = pyarrow.csv.ReadOptions(use_threads=use_threads, block_size=BLOCK_BYTES)
        return pyarrow.csv.read_csv(pa.BufferReader(data), read_options=blocks, parse_options=options)

    try:
        return read(use_threads=True)
    except pa.ArrowInvalid:
        return read(use_threads=False)  # fails too, but only this reader knows the number of the row


def _read_json(data: bytes, source: str) -> pa.Table:
    _refuse_non_utf8(data, source)
    if re.match(rb"(\xef\xbb\xbf)?\s*\[", data):
        data = _array_to_lines(data, source)
    try:
        blocks = pyarrow.json.ReadOptions(block_size=BLOCK_BYTES)
        return pyarrow.json.read_json(pa.BufferReader(data), read_options=blocks)
    except pa.ArrowInvalid as error:
        for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
            try:
                is_row = not line.strip() or isinstance(json.loads(line), dict)
                reason = "not an object: a line is one row, {column: value, …}"
            except ValueError as broken:
                is_row, reason = False, why_no_json(broken)
            if not is_row:
                raise UserError(f"{source} is malformed in line {number:,}: {reason}") from None
        # Every line is right by itself: two of them disagree. Arrow counts rows from the block, which helps nobody.
        raise UserError(f"{source} is malformed: {re.sub(r' in row [0-9]+$', '', _line(error))}") from None


def why_no_json(error: ValueError) -> str:
    """Why a line is no JSON, without the number of the line, which Python counts within it."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else _line(error)


def _array_to_lines(data: bytes, source: str) -> bytes:
    """JSON lines from a JSON array, so that one reader infers the types of both."""
    try:
        rows = json.loads(data)
    except ValueError as error:
        raise UserError(f"{source} is malformed: {_line(error)}") from None
    if not rows:
        raise UserError(f"{source} has no rows")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{source} is malformed: element {number:,} of the array is not an object")
    return "\n".join(map(json.dumps, rows)).encode()


def _refuse_non_utf8(data: bytes, source: str) -> None:
    """Raises UserError unless `data` is text in UTF-8, which Arrow would read as a column of bytes."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{source} is UTF-16, not UTF-8: convert it with iconv -f UTF-16 -t UTF-8")
    if (zero := data.find(b"\0")) >= 0:
        raise UserError(f"{source} is not text (byte {zero:,} is zero): give a text file or one of another extension")
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), BLOCK_BYTES):  # in parts: the whole as str takes up to 4 times the room
        pending = len(decoder.getstate()[0])  # bytes of a character that the edge of the part has cut
        try:
            decoder.decode(data[start : start + BLOCK_BYTES], final=start + BLOCK_BYTES >= len(data))
        except UnicodeDecodeError as error:
            at = start - pending + error.start
            line = data.count(b"\n", 0, at) + 1
            raise UserError(
                f"{source} is not UTF-8 (byte {at:,}, line {line:,}): convert it, for instance with "
                "iconv -f LATIN1 -t UTF-8"
            ) from None


def _line(error: BaseException) -> str:
    """The first line of an error of a library, not longer than a terminal's line or two."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "straddl" in line:  # Arrow's word for a row that does not fit into a block
        return f"a row is longer than {BLOCK_BYTES >> 20} MiB; is a quotation mark never closed?"
    return line if len(line) <= 200 else f"{line[:200]}…"


READERS: dict[str, Callable[[bytes, str], pa.Table]] = {
    ".csv": lambda data, source: _read_separated(data, source, ","),
    ".tsv": lambda data, source: _read_separated(data, source, "\t"),
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": lambda data, source: read_parquet(pa.BufferReader(data)),
}
