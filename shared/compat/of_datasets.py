"""Undocumented interfaces of `datasets`: its cache, its files in folders, and its metadata in tables."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa


def load_cached(name: str, config_name: str | None) -> Any:
    """`packaged_modules.cache.cache.Cache`: load the splits of a data set of the Hub from the cache of this machine.

    `load_dataset` reads the same cache, but offline only after 24 s of retries. The result is None if the data set is
    not in the cache. Without a name, the config is the only one in the cache, and `datasets` logs it.
    """
    from datasets.packaged_modules.cache.cache import Cache

    short_name = name.rpartition("/")[2]
    try:
        cache = Cache(repo_id=name, dataset_name=short_name, config_name=config_name, version="auto", hash="auto")
        return cache.as_dataset()
    except (OSError, ValueError):  # not in the cache, or several configs and no name
        return None


def load_saved(folder: Path) -> Any:
    """A data set in a folder that `save_to_disk` wrote; `load_from_disk` cannot read one without `_data_files`."""
    from datasets import Dataset, load_from_disk

    is_empty = json.loads((folder / "state.json").read_text())["_data_files"] == []
    return Dataset.from_dict({}) if is_empty else load_from_disk(folder)


def class_names(table: pa.Table, column: str, field: str | None = None) -> tuple[str, ...]:
    """The names of a column of ClassLabels or lists of them, in the metadata of a table under "huggingface"; or ().

    With `field`: the names of this field of a column of lists of structs.
    """
    type_ = table.schema.field(column).type
    type_ = getattr(type_, "value_type", type_)
    if pa.types.is_struct(type_) and field in type_.names:
        type_ = type_.field(field).type
    if not pa.types.is_integer(type_):
        return ()
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = metadata.get("info", {}).get("features", {}).get(column, {})
    feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)  # three ways to write a list
    feature = feature.get(field, feature)
    if not (isinstance(feature, dict) and feature.get("_type") == "ClassLabel"):
        return ()
    return tuple(feature.get("names") or map(str, range(feature.get("num_classes") or 0)))
