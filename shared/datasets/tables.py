"""Loading rows as Arrow tables: from the embedded docstrings, files, a `save_to_disk` folder or the Hub."""

import glob
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shared.cache.prepared import key_digest, mapped_file
from shared.compat import of_datasets
from shared.datasets import readers, rows
from shared.datasets.readers import find_files
from shared.datasets.rows import content_of, decided, missing, named, reading_in, source_of, unlabeled
from shared.errors import UserError, about, say
from shared.extras.hub import require_hub
from shared.options.data_options import DataOptions, places
from shared.plan.draws import hash64

TRAIN_SPLITS = ("train", "training")
TEST_SPLITS = ("test", "testing")
VALIDATION_SPLITS = (  # the first that exists is used; upper and lower case are equal
    *("validation", "valid", "val", "dev", "eval", "evaluation", "development"),
    *("validation_matched", "dev_matched"),  # MNLI
    *TEST_SPLITS,
)
SUBSET = 0x5B5E7  # hash word that makes the choice of a subset independent of the choice of held-out rows
EMBEDDED = "remove --dataset_name to train on the embedded docstrings, or use --train_file"


def read_parts(
    config: DataOptions,
    columns: Sequence[str],
    label_columns: Sequence[str],
    problem_type: str | None = None,
    embedded: tuple[str, Callable[[], Sequence[pa.Table]]] | None = None,
    read: Callable[[Sequence[str], str, str | None], pa.Table] | None = None,
    only_in_training: Sequence[str] = (),
) -> list[pa.Table]:
    """The training rows and, if there are any, the validation rows; `embedded`: the default data, by name and loader.

    --skip_incomplete_rows skips rows without a value in one of `columns` and `label_columns`, and training rows without
    one in `only_in_training`. With --label_delimiter, an empty cell is a row without labels, which stays. Files are
    read by `read`, with the arguments and the results of `read_file`, which is the default.

    Raises:
        UserError: the data cannot be read, a column is named twice, or --train_file also names a validation file.
    """
    if len({*columns, *label_columns}) < len({*label_columns}) + len(columns):
        raise UserError(
            f"--label_column_name {' '.join(label_columns)} and the column {' '.join(columns)}: use different columns, "
            "because the model would read its own target, or a text twice"
        )
    if config.train_file:
        given = {"--train_file": config.train_file, "--validation_file": config.validation_file}
        train, other = _files_of(config.train_file), _files_of(config.validation_file or ())
        if train != other and (both := sorted(train & other)):  # the same names in both are meant
            raise UserError(
                f"--validation_file {both[0]} is also a file of --train_file, so its rows are learned: name it once"
            )
        tables = [(read or read_file)(names, flag, config.csv_delimiter) for flag, names in given.items() if names]
    elif config.dataset_name:
        tables = read_dataset(config, label_columns)
    else:
        assert embedded, "neither --train_file nor --dataset_name, and no default data"
        tables = [named(table, embedded[0]) for table in embedded[1]()]
    if getattr(config, "label_delimiter", None) is not None:
        label_columns = ()
    if len(label_columns) == 1:
        tables[0] = decided(tables[0], label_columns[0], problem_type)
        tables[1:] = [decided(table, label_columns[0], problem_type, like=tables[0]) for table in tables[1:]]
    if config.skip_incomplete_rows:
        values = (*only_in_training, *label_columns), label_columns
        tables = [skip_incomplete(table, columns, names) for table, names in zip(tables, values, strict=False)]
    return tables


def _files_of(names: Sequence[str]) -> set[Path]:
    """The files that a setting names, also by their folders, without links; the reader refuses other names."""
    within = [f"{glob.escape(name)}/[!._]*" if os.path.isdir(name) else name for name in names]  # noqa: PTH112
    return {path.resolve() for path in places(within) if os.path.isfile(path)}  # noqa: PTH113


def split(
    tables: Sequence[pa.Table], config: DataOptions, targets_of: Callable[[pa.Table], np.ndarray] | None = None
) -> tuple[pa.Table, pa.Table]:
    """The training and validation rows of a run, from the result of `read_parts`: see `hold_out`.

    --max_train_samples and --max_eval_samples keep some of them.

    Raises:
        UserError: no row can be held out.
    """
    if len(tables) == 1:
        targets = targets_of(tables[0]) if targets_of else None
        tables = hold_out(tables[0], config.validation_split_percentage, config.seed, targets)
    found, words = [], (config.seed, SUBSET)
    for table, name in zip(tables, ("max_train_samples", "max_eval_samples"), strict=True):
        most, count = getattr(config, name), table.num_rows
        if most and most > count:
            say(f"--{name} {most}: there are only {count:,} rows, and all of them are used")
        choose = most and most < count and partial(smallest, count, most, *words)
        found.append(rows.filtered(table, choose, "chosen", most, words) if choose else table)
    return found[0], found[1]


def smallest(count: int, most: int, *words: int) -> NDArray[np.bool_]:
    """bool [count], the `most` (at least 1) rows with the smallest hashes of (*words, row), which are unique."""
    hashes = hash64(*words, np.arange(count, dtype=np.uint64))
    return hashes <= np.partition(hashes, most - 1)[most - 1]


def skip_incomplete(table: pa.Table, columns: Sequence[str], of_values: Sequence[str] = ()) -> pa.Table:
    """`table` without the rows that lack a value in one of those columns that exist; prints how many are skipped.

    In lists of the columns `of_values`, such as labels and hard negatives, an empty text is no value: see `missing`.

    Raises:
        UserError: no row is left.
    """
    there = {name: name in of_values for name in (*columns, *of_values) if name in table.column_names}

    def complete() -> np.ndarray:
        gaps = ([missing(block, *column) for column in there.items()] for block in rows.blocks_of(table))
        return ~np.concatenate([np.zeros(0, bool), *(np.any(of_block, axis=0) for of_block in gaps)])

    readings = [reading_in(table, name) for name in there]  # decide which words are gaps
    kept = rows.filtered(table, complete, "complete, also in lists and structs", there, readings) if there else table
    if not (skipped := table.num_rows - kept.num_rows):
        return table
    left_out = (
        f"{skipped:,} of {table.num_rows:,} rows of {source_of(table)} are skipped (no value in {' or '.join(there)})"
    )
    if not kept.num_rows:
        raise UserError(f"--skip_incomplete_rows: {left_out}, so no row is left")
    say(left_out)
    return kept


def read_file(given: str | Sequence[str], flag: str, csv_delimiter: str | None = None) -> pa.Table:
    """The memory-mapped rows of .csv, .tsv, .json, .jsonl or .parquet files: see `rows` and `readers.find_files`.

    Raises:
        UserError: one of them cannot be read, or two of them have different columns; names `flag`.
    """
    given = [given] if isinstance(given, str) else given
    files = find_files(given, flag, readers.KINDS, csv_delimiter)
    read = partial(readers.blocks, csv_delimiter=csv_delimiter)
    return rows.load_files(files, flag, f"{flag} {' '.join(given)}", read, csv_delimiter or "")


def read_dataset(config: DataOptions, label_columns: Sequence[str]) -> list[pa.Table]:
    """The training and the validation rows of --dataset_name: a `save_to_disk` folder, or a data set of the Hub.

    The splits are selected by the flags, or otherwise by their names. Without a validation split, a test split with
    labels replaces it, and a message is printed. Without either, there are training rows only.

    Raises:
        UserError: the data set cannot be read, or has no such split.
    """
    name, config_name = str(config.dataset_name), config.dataset_config_name
    if config_name and Path(name).is_dir():
        raise UserError(f"--dataset_config_name {config_name} has no effect on the folder {name}: remove it")
    parts = read_saved(name) if Path(name).is_dir() else read_hub(name, config_name)
    source, there = f"--dataset_name {name}", f"(splits: {', '.join(parts)})"
    train = config.train_split_name or _first_split(parts, TRAIN_SPLITS) or TRAIN_SPLITS[0]
    split = config.validation_split_name
    if train == split:
        raise UserError(f"--validation_split_name {train} is the training split {there}: use another")
    if split is None:
        others = {other: table for other, table in parts.items() if other != train}
        split = _validation_split(others, source, label_columns)
    chosen = [train, split] if split else [train]
    if without := [used for used in chosen if used not in parts or not parts[used].num_rows]:
        raise UserError(
            f"{source} has no split {without[0]} with rows {there}: select another with --train_split_name or "
            "--validation_split_name"
        )
    return [parts[used] for used in chosen]


def _validation_split(parts: Mapping[str, pa.Table], source: str, label_columns: Sequence[str]) -> str | None:
    """The split of `parts`, which lack the training split, to validate on, if there is one; says which it is."""
    split = _first_split(parts, VALIDATION_SPLITS)
    if split is None and parts:
        there = ", ".join(parts)
        say(f"{source} has no split with a usual name for validation ({there}): --validation_split_name selects one")
    elif split and split.casefold() in TEST_SPLITS and any(unlabeled(parts[split], name) for name in label_columns):
        say(f"{source} has no validation split, and its split {split} has no labels, so it cannot replace it")
        split = None
    elif split:
        selects = ": a model that is selected by its scores is selected on test data"
        say(f"{source}: its split {split} is used as validation data{selects * (split.casefold() in TEST_SPLITS)}")
    return split


def _first_split(parts: Iterable[str], names: Sequence[str]) -> str | None:
    """The split with the first of `names` that exists, ignoring case."""
    found = {split.casefold(): split for split in parts}
    return next((found[name] for name in names if name in found), None)


def hold_out(
    table: pa.Table, percentage: int, seed: int, targets: np.ndarray | None = None
) -> tuple[pa.Table, pa.Table]:
    """Split `table` into the training rows and `percentage` of held-out rows; prints how many.

    Both parts keep the order of the rows and their row numbers, and have at least one row. The choice is a function of
    (seed, row, number of rows) and, if `targets` are labels (int [N], or 0 and 1 [N, labels]), of the targets: see
    `share_of_each`.

    Raises:
        UserError: there is only one row, or each row is the only one of its label.
    """
    count, each = table.num_rows, ""
    if count < 2:
        raise UserError(f"{source_of(table)} has one row: add rows, to train and to validate on")
    if targets is None or (targets.ndim == 1 and targets.dtype.kind == "f"):
        most = min(max(1, round(count * percentage / 100)), count - 1)
        choose = cache(partial(smallest, count, most, seed))
        key: tuple[object, ...] = ("chosen", most, (seed,))
    else:
        each, file = " of each label", mapped_file(targets)
        assert file or not content_of(table), "the targets of a memory-mapped table are memory-mapped"
        key = ("share of each", file and file.parent.name, percentage, seed)
        choose = cache(partial(_share_of_each, table, targets, percentage, seed))
    held_out = rows.filtered(table, choose, *key)
    train = rows.filtered(table, lambda: ~choose(), *key, "others")
    say(
        f"{source_of(table)} has no validation data: {held_out.num_rows:,} of its rows ({percentage} %{each}, chosen "
        f"by --seed {seed}) are held out"
    )
    return train, held_out


def _share_of_each(table: pa.Table, targets: np.ndarray, percentage: int, seed: int) -> np.ndarray:
    """bool [N]: see `share_of_each`; one row if the percentage of each label is less than a row."""
    mask = share_of_each(targets, percentage, seed)
    if not mask.any():
        candidates = np.flatnonzero(share_of_each(targets, 100, seed))  # at least one row of each label stays
        if not len(candidates):
            problem = f"{source_of(table)} has one row of each label, so none can be held out"
            raise UserError(f"{problem}: use --validation_file, or add rows")
        mask[candidates[hash64(seed, candidates.astype(np.uint64)).argmin()]] = True
    return mask


def share_of_each(targets: NDArray, percentage: int, seed: int) -> NDArray[np.bool_]:
    """bool [N], the rows to hold out: `percentage` of each label, rounded to a row; a function of the arguments only.

    At least one row of each label stays in training. With several labels per row (targets [N, labels] of 0 and 1), the
    share is that of each combination of labels.

    With the rows sorted by label, and in each label by hash, these are the rows at which the rounded share grows.
    """
    several = targets.ndim > 1
    rows, axis = (np.packbits(targets > 0, axis=1), 0) if several else (targets, None)
    groups, first_rows, group_of = np.unique(rows, axis=axis, return_index=True, return_inverse=True)
    places = np.arange(len(targets))
    held_out = np.empty(len(targets), bool)
    order = np.lexsort((hash64(seed, places.astype(np.uint64)), group_of))
    held_out[order] = (places + 1) * percentage // 100 > places * percentage // 100
    # If all rows with a label are held out, the first of them returns to training.
    members = [np.flatnonzero(row) for row in np.unpackbits(groups, axis=1)] if several else groups[:, None]
    labels_of = [labels.tolist() for labels in members]
    kept = {label for group in np.unique(group_of[~held_out]) for label in labels_of[group]}
    first: dict[int, int] = {}  # row with each label
    for row, labels in sorted(zip(first_rows.tolist(), labels_of, strict=True), reverse=True):
        first |= dict.fromkeys(labels, row)
    for label in sorted({*first} - kept):
        if label not in kept:
            held_out[first[label]] = False
            kept |= {*labels_of[group_of[first[label]]]}
    return held_out


def read_saved(path: str) -> dict[str, pa.Table]:
    """The splits in a folder that `datasets.save_to_disk` wrote; a single Dataset is the split "train".

    Raises:
        UserError: the folder cannot be read.
    """
    names = Path(path) / "dataset_dict.json"
    with about(f"--dataset_name {path} (a folder, which should be one that save_to_disk of datasets wrote)"):
        splits = json.loads(names.read_text())["splits"] if names.exists() else ()
        folders = {split: Path(path) / split for split in splits} or {"train": Path(path)}
        parts = {split: of_datasets.load_saved(folder) for split, folder in folders.items()}
    return {split: _to_table(part, f"--dataset_name {path} (split {split})") for split, part in parts.items()}


def read_hub(name: str, config_name: str | None) -> dict[str, pa.Table]:
    """All splits of a data set of the Hub: from the local cache, or else downloaded if the Hub can be reached.

    Raises:
        UserError: it cannot be loaded.
    """
    if Path(name).exists():
        raise UserError(f"--dataset_name {name} is a file: use it as --train_file")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"--dataset_name {name}: no such folder")
    given = f"{name} --dataset_config_name {config_name}" if config_name else name
    with about(f"--dataset_name {given}"):
        import datasets

        if (parts := of_datasets.load_cached(name, config_name or "default")) is None:
            try:
                require_hub("--dataset_name", given, EMBEDDED)
                parts = datasets.load_dataset(name, config_name)
            except UserError:  # only the Hub knows the default config of another name
                if config_name or (parts := of_datasets.load_cached(name, None)) is None:
                    raise
    return {split: _to_table(part, f"--dataset_name {name} (split {split})") for split, part in parts.items()}


def _to_table(dataset: Any, source: str) -> pa.Table:
    """The rows of a `datasets.Dataset`, still memory-mapped, with the features (label names) in the metadata."""
    if not len(dataset):
        return named(dataset.features.arrow_schema.empty_table(), source)
    table = named(dataset.with_format("arrow")[:], source)
    # The digest is that of the files' states, because reading all bytes of a data set takes long.
    states = [rows.state_of(Path(file["filename"]), source) for file in dataset.cache_files]
    content = rows.FORMAT, states, str(dataset.features), str(dataset.split)
    return rows.of_content(table, key_digest(*content)) if states else table
