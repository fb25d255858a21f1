"""Tables with a column of labels, for tests."""

import json

import pyarrow as pa

from shared.datasets.tables import named


def table_of(values, type_=None, source="--train_file a.csv") -> pa.Table:
    return named(pa.table({"label": pa.array(values, type_)}), source)


def class_labels(table: pa.Table, names: list[str], as_list: dict | None = None) -> pa.Table:
    """`table` with the metadata that `datasets` writes for a column of ClassLabels."""
    feature = {"names": names, "_type": "ClassLabel"}
    features = {"label": feature if as_list is None else {"feature": feature, **as_list}}
    metadata = {**table.schema.metadata, b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    return table.replace_schema_metadata(metadata)
