"""Where rows come from: the embedded docstrings, a user's files, a `save_to_disk` folder, the Hub; as Arrow tables."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from shared.compat import of_datasets
from shared.config.options import Options
from shared.datasets import readers
from shared.datasets.files import find_files, kind_of
from shared.datasets.rows import joined, named, numbered, skip_incomplete, source_of, unlabeled, with_labels
from shared.errors import UserError, say
from shared.plan.hashing import hash64
from shared.plan.splits import share_of_each
from shared.pretrained.hub import require_hub

TRAIN_SPLITS = ("train", "training")
TEST_SPLITS = ("test", "testing")
VALIDATION_SPLITS = (  # the first that there is, whatever its capitals
    *("validation", "valid", "val", "dev", "eval", "evaluation", "development"),
    *("validation_matched", "dev_matched"),  # MNLI
    *TEST_SPLITS,
)
SUBSET = 0x5B5E7  # keeps the draws of a subset apart from those of a held-out part
EMBEDDED = "leave out --dataset_name to train on the embedded docstrings, or give --train_file"


def load_tables(
    config: Options,
    text_columns: Sequence[str],
    label_columns: Sequence[str],
    problem_type: str | None = None,
    targets_of: Callable[[pa.Table], np.ndarray] | None = None,
) -> tuple[pa.Table, pa.Table]:
    """The training and the validation rows; without a data set and without files, the embedded docstrings.

    A source without a validation part gives `validation_split_percentage` of its rows, chosen by `seed`, and says so:
    of each label where `targets_of` gives labels (see `split_off`).

    Raises:
        UserError: data that cannot be read, or columns that exclude each other.
    """
    refuse_shared_columns(text_columns, label_columns)
    if config.train_file or config.dataset_name:
        train, validation = read_parts(config, text_columns, label_columns, problem_type)
    else:
        from shared.datasets import demo_texts

        train, validation = (named(table, "the embedded docstrings") for table in demo_texts.load())
    if validation is None:
        targets = targets_of(train) if targets_of else None
        each = "" if targets is None or _are_numbers(targets) else " of each label"
        train, validation = split_off(train, config.validation_split_percentage, config.seed, targets)
        say(
            f"{source_of(train)} has no validation part: {validation.num_rows:,} of its rows "
            f"({config.validation_split_percentage} %{each}, chosen by --seed {config.seed}) are kept for it"
        )
    return train, validation


def read_parts(
    config: Options, columns: Sequence[str], label_columns: Sequence[str], problem_type: str | None = None
) -> tuple[pa.Table, pa.Table | None]:
    """The rows of --train_file or --dataset_name, and those to validate on if there are any.

    `columns` and `label_columns` are those in which --skip_incomplete_rows looks for gaps.

    Raises:
        UserError: they cannot be read.
    """
    validation: pa.Table | None = None
    if config.train_file:
        train = read_file(config.train_file, "--train_file", config.csv_delimiter)
        if config.validation_file:
            validation = read_file(config.validation_file, "--validation_file", config.csv_delimiter)
    else:
        train, validation = read_dataset(config, label_columns)
    if len(label_columns) == 1 and getattr(config, "label_delimiter", None) is None:
        train, validation = with_labels(train, validation, label_columns[0], problem_type)
    if config.skip_incomplete_rows:
        train = skip_incomplete(train, (*columns, *label_columns))
        validation = validation and skip_incomplete(validation, (*columns, *label_columns))
    return train, validation


def subset(count: int, most: int | None, seed: int, flag: str) -> np.ndarray | None:
    """The numbers, ascending, of the rows that --max_train_samples or --max_eval_samples leaves of `count`; None: all.

    They are a function of (seed, row, count) alone. Not the first rows, because files are often sorted by label.
    """
    if most is None or most >= count:
        if most is not None and most > count:
            say(f"{flag} {most}: there are only {count:,} rows, and all of them are taken")
        return None
    order = np.argsort(hash64(seed, SUBSET, np.arange(count, dtype=np.uint64)), kind="stable")
    return np.sort(order[:most])


def limited(tables: tuple[pa.Table, pa.Table], config: Options) -> tuple[pa.Table, pa.Table]:
    """Training and validation rows, of which --max_train_samples and --max_eval_samples leave some."""
    found = []
    for table, name in zip(tables, ("max_train_samples", "max_eval_samples"), strict=True):
        rows = subset(table.num_rows, getattr(config, name), config.seed, f"--{name}")
        kept = np.zeros(table.num_rows, bool)
        kept[slice(None) if rows is None else rows] = True
        found.append(table if rows is None else numbered(table).filter(pa.array(kept)))
    return found[0], found[1]


def refuse_shared_columns(text_columns: Sequence[str], label_columns: Sequence[str]) -> None:
    """UserError when the texts would hold a label, or the same text twice."""
    if shared := [name for name in label_columns if name in text_columns]:
        raise UserError(
            f"--text_column_names {' '.join(text_columns)} and --label_column_name {shared[0]}: the model would "
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


def read_dataset(config: Options, label_columns: Sequence[str] = ()) -> tuple[pa.Table, pa.Table | None]:
    """The training and the validation rows of --dataset_name: a `save_to_disk` folder, or a data set of the Hub.

    Which splits these are, the flags say, or else their names. Without a validation split a test split serves as one,
    which is said, unless it has no labels. Without either there is None.

    Raises:
        UserError: it cannot be read, or has no such split.
    """
    name, config_name = str(config.dataset_name), config.dataset_config_name
    if config_name and Path(name).is_dir():
        raise UserError(f"--dataset_config_name {config_name} has a meaning only for a data set of the Hub")
    parts = read_saved(name) if Path(name).is_dir() else read_hub(name, config_name)
    source, there = f"--dataset_name {name}", f"(splits: {', '.join(parts)})"
    for flag in ("train_split_name", "validation_split_name"):
        if (given := getattr(config, flag)) not in (None, *parts):
            raise UserError(f"--{flag} {given}: {source} has no such split {there}")
    train = config.train_split_name or _first(parts, TRAIN_SPLITS)
    if train is None:
        raise UserError(f"{source} has no train split {there}: say --train_split_name")
    if train == config.validation_split_name:
        raise UserError(f"--validation_split_name {train} is the split that is trained on {there}: name another")
    if config.validation_split_name:
        return _filled(parts, train, source), _filled(parts, config.validation_split_name, source)
    split = _first({other: table for other, table in parts.items() if other != train}, VALIDATION_SPLITS)
    if split and split.casefold() in TEST_SPLITS and any(unlabeled(parts[split], name) for name in label_columns):
        say(f"{source} has no validation split, and its split {split} has no labels, so nothing can be validated on it")
        split = None
    elif split and split.casefold() in TEST_SPLITS:
        say(
            f"{source} has no validation split: its {split} split serves as one, so what is chosen by its scores is "
            "chosen on test data"
        )
    elif split is None and len(parts) > 1:
        say(f"{source} has no split that is known to be for validation {there}: --validation_split_name names one")
    elif split not in (None, "validation"):
        say(f"{source}: its split {split} is the validation data")
    return _filled(parts, train, source), _filled(parts, split, source) if split else None


def _first(parts: Iterable[str], names: Sequence[str]) -> str | None:
    """The first of `names` that a split has, whatever its capitals."""
    found = {split.casefold(): split for split in parts}
    return next((found[name] for name in names if name in found), None)


def _filled(parts: dict[str, pa.Table], split: str, source: str) -> pa.Table:
    """A split that has rows."""
    if not parts[split].num_rows:
        others = ", ".join(f"{name}: {table.num_rows:,}" for name, table in parts.items())
        raise UserError(f"{source}: its split {split} has no rows ({others}): leave it out, or name another split")
    return parts[split]


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
    table = numbered(table)
    # filter and not take: take joins the chunks of a column, which overflows beyond 2 GiB of text.
    return table.filter(pa.array(~held_out)), table.filter(pa.array(held_out))


def _are_numbers(targets: np.ndarray) -> bool:
    """Whether targets are numbers to be predicted, and no labels."""
    return targets.ndim == 1 and targets.dtype.kind == "f"


def read_saved(path: str) -> dict[str, pa.Table]:
    """The splits of a folder written by `datasets.save_to_disk`; a single Dataset is the split "train"."""
    datasets = _import_datasets(path)
    try:
        folders = {"train": Path(path)}
        if (names := Path(path) / "dataset_dict.json").exists():
            folders = {split: Path(path) / split for split in json.loads(names.read_text())["splits"]}
        tables = {}
        for split, folder in folders.items():
            empty = of_datasets.is_saved_empty(folder)  # which load_from_disk cannot read
            part = datasets.Dataset.from_dict({}) if empty else datasets.load_from_disk(str(folder))
            tables[split] = _to_table(part, f"--dataset_name {path} (split {split})")
        return tables
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
    given = f"{name} --dataset_config_name {config_name}" if config_name else name
    try:
        parts = of_datasets.load_cached(name, config_name)
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
    rows = dataset.with_format("arrow")[:] if len(dataset) else dataset.features.arrow_schema.empty_table()
    return named(rows, source)
