"""Where rows come from: the embedded docstrings, a user's files, a `save_to_disk` folder, the Hub; as Arrow tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shared.batches import hash64
from shared.datasets import readers
from shared.datasets.files import find_files, kind_of
from shared.datasets.rows import joined, named, numbered, say, source_of, with_labels
from shared.errors import UserError
from shared.hub import require_hub
from shared.options import Options

VALIDATION_SPLITS = ("validation", "validation_matched", "test")  # the first that there is; the second: MNLI
EMBEDDED = "leave out --dataset_name to train on the embedded docstrings, or give --train_file"


def load_tables(
    config: Options, text_columns: Sequence[str], label_column: str, problem_type: str | None = None
) -> tuple[pa.Table, pa.Table]:
    """The training and the validation rows; without a data set and without files, the embedded docstrings.

    A source without a validation part gives `validation_split_percentage` of its rows, chosen by `seed`, and says so.

    Raises:
        UserError: data that cannot be read, or columns that exclude each other.
    """
    refuse_shared_columns(text_columns, label_column)
    if config.train_file or config.dataset_name:
        train, validation = read_parts(config, label_column, problem_type)
    else:
        from shared.datasets import docstrings

        train, validation = (named(table, "the embedded docstrings") for table in docstrings.load())
    if validation is None:
        train, validation = split_off(train, config.validation_split_percentage, config.seed)
        say(
            f"{source_of(train)} has no validation part: {validation.num_rows:,} of its rows "
            f"({config.validation_split_percentage} %, chosen by --seed {config.seed}) are kept for it"
        )
    return train, validation


def read_parts(config: Options, label_column: str, problem_type: str | None = None) -> tuple[pa.Table, pa.Table | None]:
    """The rows of --train_file or --dataset_name, and those to validate on if there are any.

    Raises:
        UserError: they cannot be read.
    """
    validation: pa.Table | None = None
    if config.train_file:
        train = read_file(config.train_file, "--train_file")
        if config.validation_file:
            validation = read_file(config.validation_file, "--validation_file")
    else:
        assert config.dataset_name
        train, validation = read_dataset(config.dataset_name, config.dataset_config_name)
    return with_labels(train, validation, label_column, problem_type)


def refuse_shared_columns(text_columns: Sequence[str], label_column: str) -> None:
    """UserError when the texts would hold the label, or the same text twice."""
    if label_column in text_columns:
        raise UserError(
            f"--text_column_names {' '.join(text_columns)} and --label_column_name {label_column}: the model would "
            "read its own target; give each of them a column of its own"
        )
    if len({*text_columns}) < len(text_columns):
        raise UserError(f"--text_column_names {' '.join(text_columns)}: a pair is two different columns")


def read_file(given: str | Sequence[str], flag: str, csv_delimiter: str | None = None) -> pa.Table:
    """The rows of the files that `given` names, .csv, .tsv, .json, .jsonl or .parquet: see `files.find_files`.

    Raises:
        UserError: one of them cannot be read, or two of them have other columns; names `flag`.
    """
    given = [given] if isinstance(given, str) else given
    files = find_files(given, flag, readers.KINDS)
    if csv_delimiter is not None and not any(kind_of(file) in (".csv", ".tsv") for file in files):
        raise UserError(f"--csv_delimiter {csv_delimiter} has no effect on {flag} {files[0]}: leave it out")
    tables = [named(readers.read(file, f"{flag} {file}", csv_delimiter), f"{flag} {file}") for file in files]
    return joined(tables, f"{flag} {' '.join(given)}")


def read_dataset(name: str, config_name: str | None) -> tuple[pa.Table, pa.Table | None]:
    """The training and the validation rows of --dataset_name: a `save_to_disk` folder, or a data set of the Hub.

    Without a validation split its test split serves as one, which is said; without either there is None.

    Raises:
        UserError: it cannot be read, or has no train split.
    """
    if config_name and Path(name).is_dir():
        raise UserError(f"--dataset_config_name {config_name} has a meaning only for a data set of the Hub")
    parts = read_saved(name) if Path(name).is_dir() else read_hub(name, config_name)
    if "train" not in parts:
        raise UserError(f"--dataset_name {name} has no train split (splits: {', '.join(parts)})")
    split = next((split for split in VALIDATION_SPLITS if split in parts), None)
    if split == "test":
        say(
            f"--dataset_name {name} has no validation split: its test split serves as one, so what is chosen by its "
            "scores is chosen on test data"
        )
    return parts["train"], parts[split] if split else None


def split_off(table: pa.Table, percentage: int, seed: int) -> tuple[pa.Table, pa.Table]:
    """`table` without `percentage` of its rows, and those rows; both keep the order and remember their row numbers.

    Which rows is a function of (seed, row, number of rows) alone. Each part gets at least one row.
    """
    rows = table.num_rows
    if rows < 2:
        raise UserError(f"{source_of(table)} has one row: too few to train on and to validate")
    count = min(max(1, round(rows * percentage / 100)), rows - 1)
    held_out = np.zeros(rows, bool)
    held_out[np.argsort(hash64(seed, np.arange(rows, dtype=np.uint64)), kind="stable")[:count]] = True
    table = numbered(table)
    # filter and not take: take joins the chunks of a column, which overflows beyond 2 GiB of text.
    return table.filter(pa.array(~held_out)), table.filter(pa.array(held_out))


def read_saved(path: str) -> dict[str, pa.Table]:
    """The splits of a folder written by `datasets.save_to_disk`; a single Dataset is the split "train"."""
    datasets = _import_datasets(path)
    try:
        saved = datasets.load_from_disk(path)
        parts = saved if isinstance(saved, dict) else {"train": saved}
        return {split: _to_table(part, f"--dataset_name {path} (split {split})") for split, part in parts.items()}
    except (OSError, ValueError, LookupError) as error:  # Arrow's errors are ValueErrors
        raise UserError(
            f"--dataset_name {path} is a folder, but not one that datasets' save_to_disk wrote "
            f"({readers.first_line(error)}): give such a folder, or a file as --train_file"
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
            raise UserError(f"--dataset_name {given} cannot be loaded: {readers.first_line(error)}") from None
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
