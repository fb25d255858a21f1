"""The label column of a table, whatever it holds, as targets for a loss: class ids, label vectors or numbers."""

import json
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.datasets.tables import column_of, source_of, where
from shared.errors import UserError

Kind = Literal["classification", "multi_label", "regression"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

FLAG = "--label_column_name"
KINDS: dict[str, Kind] = {
    "single_label_classification": "classification",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
MOST_CLASSES = 100  # beyond these, classes of fewer than two rows on average are taken for ids or numbers


@dataclass(frozen=True)
class Labels:
    """What the label column means: learned from the training table, applied to every table."""

    kind: Kind
    column: str
    names: tuple[str, ...] = ()  # of the classes or labels, in the order of the model's outputs; none for regression
    values: tuple[str, ...] = ()  # what the column holds for each of them, as text

    def __str__(self) -> str:
        names = f": {', '.join(self.names[:10])}{', ...' * (len(self.names) > 10)}" if self.names else ""
        return f"{self.kind}, {self.num_labels} labels{names}"

    @property
    def num_labels(self) -> int:
        """Outputs of the model: one for each class or label; one for regression."""
        return len(self.names) or 1

    @property
    def problem_type(self) -> str:
        """The kind by the name that a transformers config has for it."""
        return next(name for name, kind in KINDS.items() if kind == self.kind)

    @classmethod
    def from_table(cls, table: pa.Table, column: str, problem_type: ProblemType | None = None) -> "Labels":
        """What `column` of the training table means.

        Strings, integers and booleans are classes, floats are numbers to be predicted, lists are several labels at
        once; `problem_type` overrules that where the values allow it. The classes are those found, sorted, unless
        `datasets` has left the names of all of them in the metadata. UserError if there is no such column, if it cannot
        be what `problem_type` says, if a label is missing, or if there are fewer than two classes.
        """
        source = f"{FLAG} {column}: {source_of(table)}"
        kind = _kind(column_of(table, column, FLAG).type, problem_type and KINDS[problem_type], source)
        cells, rows = _cells(table, column, kind)
        if kind == "regression":
            _numbers(table, column, cells)
            return cls(kind, column)
        if pa.types.is_floating(cells.type) and len(fractional := np.flatnonzero(~_is_whole(cells))):
            found = f"{where(table, rows[fractional[0]])} has {cells[fractional[0]]} in {column}"
            raise UserError(f"{found}, which is no class: use --problem_type regression")
        distinct = _texts(cells).unique().to_pylist()
        if len(distinct) < 2:
            raise UserError(f"{source} has fewer than two classes ({', '.join(distinct) or 'none'}): nothing to learn")
        if names := _class_names(table, column):
            return cls(kind, column, names, tuple(map(str, range(len(names)))))
        if len(distinct) > max(MOST_CLASSES, table.num_rows / 2) and kind == "classification":
            raise UserError(
                f"{source} has {len(distinct):,} different values in {table.num_rows:,} rows, too many for classes: "
                "give another column, or --problem_type regression if it holds numbers"
            )
        is_number = pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type)
        values = tuple(sorted(distinct, key=int if is_number else None))
        return cls(kind, column, values, values)

    def encode(self, table: pa.Table) -> np.ndarray:
        """The targets of the rows: int64 [N] class ids, float32 [N, num_labels] of 0 and 1, or float32 [N] numbers.

        UserError, which names the row, for a label that is missing, unknown to training, or not finite in float32.
        """
        source = f"{FLAG} {self.column}: {source_of(table)}"
        _kind(column_of(table, self.column, FLAG).type, self.kind, source)
        cells, rows = _cells(table, self.column, self.kind)
        if self.kind == "regression":
            return _numbers(table, self.column, cells)
        # As text, because a small validation file may show another type: 1, 2 where training has 1, 2, "none".
        texts = _texts(cells)
        found = pc.index_in(texts, pa.array(self.values))
        if len(unknown := np.flatnonzero(found.is_null())):
            others = texts.take(pa.array(unknown)).unique().to_pylist()
            listed = ", ".join(others[:5]) + (f" and {len(others) - 5:,} more" if len(others) > 5 else "")
            raise UserError(
                f"{where(table, rows[unknown[0]])} has a label in {self.column} that training does not have "
                f"(unknown: {listed}): leave such rows out, or add some to the training data"
            )
        ids = found.to_numpy().astype(np.int64)
        if self.kind == "classification":
            return ids
        targets = np.zeros((table.num_rows, self.num_labels), np.float32)
        np.add.at(targets, (rows, ids), 1)
        if len(repeated := np.argwhere(targets > 1)):
            row, label = repeated[0]
            raise UserError(
                f"{where(table, row)} has the label {self.values[label]} twice in {self.column}: a list holds the "
                "labels of its row, not a 0 or 1 for each label there is"
            )
        return targets


def _kind(type_: pa.DataType, wanted: Kind | None, source: str) -> Kind:
    """What a column of this type is, or `wanted`; UserError if it cannot be that."""
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    is_fraction = pa.types.is_floating(type_) or pa.types.is_decimal(type_)
    is_number = is_fraction or pa.types.is_integer(type_)
    is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_)
    if is_list:
        _kind(type_.value_type, "classification", source)  # a list of lists has no meaning
    elif not (is_number or is_text or pa.types.is_boolean(type_) or pa.types.is_null(type_)):
        raise UserError(f"{source} holds {type_}: labels are strings, numbers, booleans, or lists of them")
    kind = wanted or ("multi_label" if is_list else "regression" if is_fraction else "classification")
    if is_list != (kind == "multi_label"):
        needs = "a list of labels for each row" if kind == "multi_label" else "one label for each row"
        raise UserError(f"{source} holds {type_}, but {kind} needs {needs}: see --problem_type")
    if kind == "regression" and not (is_number or pa.types.is_null(type_)):
        raise UserError(f"{source} holds {type_}, but regression needs numbers: see --problem_type")
    return kind


def _cells(table: pa.Table, column: str, kind: Kind) -> tuple[pa.Array, np.ndarray]:
    """The labels of all rows one after the other, and the row of each; UserError for the first that is missing."""
    cells = column_of(table, column, FLAG).combine_chunks()
    rows = np.arange(table.num_rows)
    if kind == "multi_label":
        _refuse_missing(table, column, cells.is_null(), rows)
        lists = cells.cast(pa.list_(cells.type.value_type))
        cells, rows = pc.list_flatten(lists), np.asarray(pc.list_parent_indices(lists))
    if pa.types.is_decimal(cells.type):
        cells = cells.cast(pa.float64())
    if pa.types.is_large_string(cells.type) or pa.types.is_string_view(cells.type):
        cells = cells.cast(pa.string())
    _refuse_missing(table, column, cells.is_null(nan_is_null=True), rows)
    if pa.types.is_string(cells.type):
        _refuse_missing(table, column, pc.equal(pc.utf8_trim_whitespace(cells), ""), rows)
    if _class_names(table, column):  # the Hub's way to say that the labels of a test split are not published
        _refuse_missing(table, column, pc.equal(cells, -1), rows)
    return cells, rows


def _refuse_missing(table: pa.Table, column: str, missing: pa.Array, rows: np.ndarray) -> None:
    if len(found := np.flatnonzero(missing)):
        count = len(np.unique(rows[found]))
        such = f" ({count:,} such rows)" if count > 1 else ""
        raise UserError(f"{where(table, rows[found[0]])} has no label in {column}{such}: fill it in or leave it out")


def _is_whole(cells: pa.Array) -> np.ndarray:
    numbers = cells.to_numpy()
    return (numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53)


def _texts(cells: pa.Array) -> pa.Array:
    """The labels as strings; whole floats (integers that some program stored beside gaps) as integers."""
    if pa.types.is_floating(cells.type) and _is_whole(cells).all():
        cells = cells.cast(pa.int64())
    return cells.cast(pa.string())


def _numbers(table: pa.Table, column: str, cells: pa.Array) -> np.ndarray:
    """float32 [N]; UserError for a number that is not finite in float32."""
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and is refused
        numbers = cells.cast(pa.float64()).to_numpy().astype(np.float32)
    if len(infinite := np.flatnonzero(~np.isfinite(numbers))):
        row = int(infinite[0])
        raise UserError(f"{where(table, row)} has {cells[row]} in {column}, which is not finite in float32")
    return numbers


def _class_names(table: pa.Table, column: str) -> tuple[str, ...]:
    """The names that `datasets` keeps in the metadata for a column of ClassLabels or of lists of them; else none."""
    type_ = table.schema.field(column).type
    if not pa.types.is_integer(getattr(type_, "value_type", type_)):
        return ()
    metadata = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = metadata.get("info", {}).get("features", {}).get(column, {})
    feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)  # three ways to write a list
    return tuple(feature["names"]) if feature.get("_type") == "ClassLabel" else ()
