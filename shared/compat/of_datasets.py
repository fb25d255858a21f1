"""Undocumented interfaces of `datasets`: its cache, and what it writes into folders and into metadata of tables."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa


def load_cached(name: str, config_name: str | None) -> Any:
    """`packaged_modules.cache.cache.Cache`: the splits of a data set of the Hub that is on this machine.

    Without that name `load_dataset`, which reads the same cache, but without a network only after 24 s of retries.

    Raises:
        OSError or ValueError: it is not there, or there are several configs and none is chosen.
    """
    try:
        from datasets.packaged_modules.cache.cache import Cache
    except ImportError:
        from datasets import load_dataset

        return load_dataset(name, config_name)
    short_name = name.rpartition("/")[2]
    cache = Cache(repo_id=name, dataset_name=short_name, config_name=config_name, version="auto", hash="auto")
    return cache.as_dataset()


def is_saved_empty(folder: Path) -> bool:
    """`_data_files` in the state.json that `save_to_disk` wrote: whether the folder holds a data set without rows.

    Without that name the answer is no, and `load_from_disk` raises if it cannot read the folder.
    """
    return json.loads((folder / "state.json").read_text()).get("_data_files") == []


def feature(table: pa.Table, column: str) -> Any:
    """What the metadata of a table says of the feature of a column (under "huggingface"); {} if nothing."""
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    return metadata.get("info", {}).get("features", {}).get(column, {})


def is_class_label(described: Any) -> bool:
    """Whether `_type` of such a feature is that of a ClassLabel."""
    return isinstance(described, dict) and described.get("_type") == "ClassLabel"
