"""Label columns of a table as targets of a loss: class ids, label vectors or numbers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.compat import of_datasets
from shared.datasets.rows import FILL_IN, INTEGER, column_of, source_of, where
from shared.errors import UserError, listed, say

Kind = Literal["classification", "multi_label", "regression"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

FLAG = "--label_column_name"
KINDS: dict[str, Kind] = {
    "single_label_classification": "classification",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
MAX_CLASSES = 100  # with more, and fewer than two rows per class on average, the values are probably not classes
ZERO_ONE = {"0": 0, "1": 1, "false": 0, "true": 1}  # the values of a column for one label, in lower case


@dataclass(frozen=True)
class Labels:
    """The meaning of the label columns: learned from the training table and applied to every table."""

    kind: Kind
    column: str | tuple[str, ...]  # several columns: each contains 0 or 1 for one label
    names: tuple[str, ...] = ()  # the classes or labels in the order of the model's outputs; empty for regression
    values: tuple[str, ...] = ()  # the value in the column for each name, as text
    named: bool = False  # whether `names` come from a ClassLabel of `datasets`, and `values` are its ids
    vectors: bool = False  # whether the column contains lists with 0 or 1 for each label
    delimiter: str | None = None  # separates the labels of a row in a text column

    def __str__(self) -> str:
        names = f": {', '.join(self.names[:10])}{', ...' * (len(self.names) > 10)}" if self.names else ""
        return f"{self.kind}, {self.num_labels} labels{names}"

    @property
    def num_labels(self) -> int:
        """The number of outputs of the model: one for each class or label; one for regression."""
        return len(self.names) or 1

    @property
    def problem_type(self) -> str:
        """The kind as the `problem_type` of a transformers config."""
        return next(name for name, kind in KINDS.items() if kind == self.kind)

    @classmethod
    def from_table(
        cls,
        table: pa.Table,
        column: str | Sequence[str],
        problem_type: ProblemType | None = None,
        delimiter: str | None = None,
    ) -> "Labels":
        """Learn the meaning of the label column or columns of the training table.

        Strings, integers and booleans are classes, floats are numbers to be predicted, and a list has the labels of its
        row, or 0 or 1 for each label. `problem_type` overrides this where the values allow it. The class names are the
        sorted values of the column, or all names of a ClassLabel of `datasets` if the metadata has one. Several columns
        contain 0 or 1 in each row, for the label of the column's name. With a `delimiter`, the column is text with the
        labels of its row, separated by the delimiter.

        Raises:
            UserError: a column does not exist, its values do not fit `problem_type` or `delimiter`, a label is missing,
                there are fewer than two classes, or each row has the same labels.
        """
        columns = (column,) if isinstance(column, str) else tuple(column)
        several = _gives_several_labels(columns, problem_type, delimiter)
        if len(columns) > 1:
            labels = cls("multi_label", columns, columns, columns)
            return labels._checked_not_constant(table)
        column = columns[0]
        source = f"{FLAG} {column}: {source_of(table)}"
        kind: Kind = "multi_label"
        if not several:
            kind = _kind(column_of(table, column, FLAG).type, problem_type and KINDS[problem_type], source)
        cells, rows = _cells(table, column, kind, delimiter)
        if kind == "regression":
            _numbers(table, column, cells)
            return cls(kind, column)
        if pa.types.is_floating(cells.type) and len(fractional := np.flatnonzero(~_is_whole(cells))):
            found = f"{where(table, rows[fractional[0]])} has {cells[fractional[0]]} in {column}"
            raise UserError(f"{found}, which is not a class: use --problem_type regression")
        distinct = _texts(cells).unique().to_pylist()
        if delimiter is not None and not _contains_delimiter(table, column, delimiter):
            raise UserError(
                f"--label_delimiter {delimiter} is in no row of {source_of(table)} ({column}: {listed(distinct)}): "
                "use the text that separates two labels"
            )
        classes = class_names(table, column)
        if kind == "multi_label" and not several and not classes and (width := _vector_width(cells, rows, table)):
            if width == 2 and (np.bincount(rows, _zeros_and_ones(cells) == 1) == 1).all():
                say(f"{source} has only [0, 1] and [1, 0]: read as 0 or 1 for each of two labels, not as label ids")
            names = tuple(map(str, range(width)))
            return cls(kind, column, names, names, vectors=True)._checked_not_constant(table)
        if len(distinct) < 2:
            raise UserError(f"{source} has fewer than two classes ({', '.join(distinct) or 'none'}): add another")
        if classes:
            numbers = tuple(map(str, range(len(classes))))
            labels = cls(kind, column, classes, numbers, named=True)
            return labels._checked_not_constant(table) if kind == "multi_label" else labels
        if len(distinct) > max(MAX_CLASSES, table.num_rows / 2) and kind == "classification":
            raise UserError(
                f"{source} has {len(distinct):,} different values in {table.num_rows:,} rows, too many for classes: "
                "use another column, or --problem_type regression if the labels are numbers"
            )
        by_text: dict[str, str] = {}
        for text in distinct:
            if (other := by_text.setdefault(text.strip(), text)) != text:
                raise UserError(
                    f"{source} has the labels {other!r} and {text!r}, which differ in white space: make them equal"
                )
        in_order = (lambda value: (int(value), value)) if all(re.match(INTEGER, v) for v in distinct) else None
        values = tuple(sorted(distinct, key=in_order))
        labels = cls(kind, column, values, values, delimiter=delimiter)
        return labels._checked_not_constant(table) if kind == "multi_label" else labels

    def ordered(self, names: tuple[str, ...]) -> "Labels":
        """The same labels in the order of `names`, a permutation of the names of these labels."""
        assert sorted(names) == sorted(self.names), f"{names} are not {self.names}"
        places = [self.names.index(name) for name in names]
        return replace(self, names=names, values=tuple(self.values[place] for place in places))

    def encode(self, table: pa.Table) -> np.ndarray:
        """The targets of the rows: int64 [N] class ids, float32 [N, num_labels] of 0 and 1, or float64 [N] numbers.

        Raises:
            UserError: a label is missing, unknown in training or not finite in float32 (names the row); or the labels
                of this table do not match those of training, or match them in two ways.
        """
        if isinstance(self.column, tuple):
            columns = [_zero_one_column(table, name) for name in self.values]
            return np.stack(columns, 1).astype(np.float32)
        source = f"{FLAG} {self.column}: {source_of(table)}"
        if self.delimiter is None:
            _kind(column_of(table, self.column, FLAG).type, self.kind, source)
        cells, rows = _cells(table, self.column, self.kind, self.delimiter)
        if self.kind == "regression":
            return _numbers(table, self.column, cells)
        if self.vectors:
            marks = _vectors(table, self.column, cells, rows, self.num_labels)
            return marks[:, list(map(int, self.values))].astype(np.float32)
        ids = self._ids(table, self.column, cells, rows)
        if self.kind == "classification":
            return ids
        targets = np.zeros((table.num_rows, self.num_labels), np.float32)
        np.add.at(targets, (rows, ids), 1)
        if len(repeated := np.argwhere(targets > 1)):
            row, label = repeated[0]
            raise UserError(
                f"{where(table, row)} has the label {self.names[label]} twice in {self.column}: write either the "
                "labels of each row as a list, or in all rows 0 or 1 for each label"
            )
        return targets

    def _ids(self, table: pa.Table, column: str, cells: pa.Array, rows: np.ndarray) -> np.ndarray:
        """int64, the id of the class or label in each cell.

        Names are compared with names. If only one of this table and training has the names of a ClassLabel, the values
        of the other may be its names or its ids; the interpretation that fits is used.
        """
        # Compared as text: the inferred type of a small validation file may differ (1, 2; in training 1, 2, "none").
        texts = _texts(cells)
        classes = class_names(table, column)
        called = _names_of_ids(table, column, cells, rows, classes) if classes else texts
        found = pc.index_in(called, pa.array(self.names))
        by_number = pc.index_in(texts, pa.array(self.values))
        if self.named != bool(classes) and by_number.null_count == 0:
            if found.null_count:
                found = by_number
                meant = ", ".join(f"{number} is {name}" for number, name in list(enumerate(classes or self.names))[:5])
                if classes:
                    say(f"{source_of(table)} has names of labels, training only numbers: matched by number ({meant})")
                else:
                    say(f"{source_of(table)} has numbers in {column} where training has names: read as {meant}")
            elif not found.equals(by_number):
                raise UserError(
                    f"{FLAG} {column}: the numbers of {source_of(table)} can be names or numbers of classes, because "
                    f"only one of it and the training data (with {listed(self.names)}) has a ClassLabel: save both "
                    "with a ClassLabel, or neither"
                )
        if self.named and not classes and found.null_count:
            _refuse_missing(table, column, pc.equal(texts, "-1"), rows)
        if len(unknown := np.flatnonzero(found.is_null())):
            others = called.take(pa.array(unknown)).unique().to_pylist()
            if len(unknown) == len(called) and _are_numbers(others) != _are_numbers(self.names):
                kinds = ("numbers", "names") if _are_numbers(others) else ("names", "numbers")
                raise UserError(
                    f"{source_of(table)} has {kinds[0]} in {column} ({listed(others)}) where the training data has "
                    f"{kinds[1]} ({listed(self.names)}): write the same labels in both"
                )
            raise UserError(
                f"{where(table, rows[unknown[0]])} has a label in {column} that training does not have "
                f"(unknown: {listed(others)}; known: {listed(self.names)}): remove such rows, or add rows with these "
                "labels to the training data"
            )
        return found.to_numpy().astype(np.int64)

    def _checked_not_constant(self, table: pa.Table) -> "Labels":
        """These multi-label labels, after a check that the rows of the training table differ in them.

        Raises:
            UserError: every row has the same labels; or see `encode`.
        """
        targets = self.encode(table)
        if len(targets) > 1 and (targets == targets[0]).all():
            names = self.column if isinstance(self.column, str) else " ".join(self.column)
            raise UserError(f"{FLAG} {names}: every row of {source_of(table)} has the same labels: add other rows")
        return self


def _gives_several_labels(columns: tuple[str, ...], problem_type: ProblemType | None, delimiter: str | None) -> bool:
    """Whether the flags give each row several labels; UserError if they contradict each other."""
    given = f"{FLAG} {' '.join(columns)}"
    if len(columns) != len(set(columns)):
        raise UserError(f"{given} names a column twice: name each column once")
    if delimiter == "":
        raise UserError("--label_delimiter '' is empty: use the text that separates two labels, such as ,")
    if delimiter is not None:
        if len(columns) > 1:
            raise UserError(
                f"{given} with --label_delimiter {delimiter}: use one text column, or several columns of 0 and 1 "
                "without a delimiter"
            )
        given = f"--label_delimiter {delimiter}"
    several = len(columns) > 1 or delimiter is not None
    if several and problem_type not in (None, "multi_label_classification"):
        raise UserError(
            f"{given} gives a row several labels, but --problem_type {problem_type} allows one: remove one of the flags"
        )
    return several


def _kind(type_: pa.DataType, wanted: Kind | None, source: str) -> Kind:
    """The kind of labels in a column of this type, or `wanted`; UserError if the type does not fit that."""
    is_list = pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_)
    is_fraction = pa.types.is_floating(type_) or pa.types.is_decimal(type_)
    is_number = is_fraction or pa.types.is_integer(type_)
    is_text = pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_)
    if is_list:
        _kind(type_.value_type, "classification", source)  # refuses lists of lists
    elif not (is_number or is_text or pa.types.is_boolean(type_) or pa.types.is_null(type_)):
        raise UserError(f"{source} contains {type_}: labels are strings, numbers, booleans, or lists of them")
    kind = wanted or ("multi_label" if is_list else "regression" if is_fraction else "classification")
    if is_list != (kind == "multi_label"):
        needs = (
            "a list of labels for each row, several columns or --label_delimiter"
            if kind == "multi_label"
            else "one label for each row"
        )
        raise UserError(f"{source} contains {type_}, but {kind} needs {needs}: see --problem_type")
    if kind == "regression" and not (is_number or pa.types.is_null(type_)):
        raise UserError(f"{source} contains {type_}, but regression needs numbers: see --problem_type")
    return kind


def _cells(table: pa.Table, column: str, kind: Kind, delimiter: str | None = None) -> tuple[pa.Array, np.ndarray]:
    """The concatenated labels of all rows, and the row number of each; UserError for the first missing label.

    With a delimiter no label can be missing: a row with an empty text has no labels.
    """
    cells = column_of(table, column, FLAG, as_text=delimiter is not None).combine_chunks()
    rows = np.arange(table.num_rows)
    if delimiter is not None:
        _kind(cells.type, "classification", f"--label_delimiter {delimiter}: {source_of(table)}")
        texts = pc.split_pattern(pc.fill_null(cells.cast(pa.string()), ""), delimiter)
        cells, rows = pc.utf8_trim_whitespace(pc.list_flatten(texts)), np.asarray(pc.list_parent_indices(texts))
        given = np.asarray(pc.not_equal(cells, ""))
        return cells.filter(pa.array(given)), rows[given]
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
    if class_names(table, column):  # on the Hub, -1 means that the labels of a test split are not published
        _refuse_missing(table, column, pc.equal(cells, -1), rows)
    return cells, rows


def _contains_delimiter(table: pa.Table, column: str, delimiter: str) -> bool:
    """Whether any row contains the delimiter."""
    texts = column_of(table, column, FLAG, as_text=True).cast(pa.string())
    return pc.any(pc.match_substring(texts, delimiter)).as_py() or False


def _zeros_and_ones(cells: pa.Array) -> np.ndarray:
    """int64: the 0 or 1 of each cell, and -1 for another value."""
    texts = pc.utf8_lower(pc.utf8_trim_whitespace(_texts(cells)))
    found = pc.index_in(texts, pa.array(list(ZERO_ONE)))
    return np.array([*ZERO_ONE.values(), -1])[np.asarray(pc.fill_null(found, -1))]


def _zero_one_column(table: pa.Table, column: str) -> np.ndarray:
    """int64 [N]: the 0 or 1 in the column of one label; UserError for a row with another value."""
    _kind(column_of(table, column, FLAG).type, "classification", f"{FLAG} {column}: {source_of(table)}")
    cells, _ = _cells(table, column, "classification")
    marks = _zeros_and_ones(cells)
    if len(others := np.flatnonzero(marks < 0)):
        row = int(others[0])
        raise UserError(
            f"{where(table, row)} has {cells[row]} in {column}: with several label columns, write 1 if the row has the "
            "label of the column's name, otherwise 0"
        )
    return marks


def _vector_width(cells: pa.Array, rows: np.ndarray, table: pa.Table) -> int:
    """The length of the lists if all are vectors of 0 and 1 with the same length of at least two; otherwise 0."""
    widths = np.bincount(rows, minlength=table.num_rows)
    text = pa.types.is_string(cells.type)
    is_vector = not text and widths[0] > 1 and (widths == widths[0]).all() and (_zeros_and_ones(cells) >= 0).all()
    return int(widths[0]) if is_vector else 0


def _vectors(table: pa.Table, column: str, cells: pa.Array, rows: np.ndarray, width: int) -> np.ndarray:
    """int64 [N, width]; UserError for a row that is not a vector of 0 and 1 with this width."""
    wrong = np.bincount(rows, minlength=table.num_rows) != width
    marks = _zeros_and_ones(cells)
    wrong[rows[marks < 0]] = True
    if len(found := np.flatnonzero(wrong)):
        row = int(found[0])
        raise UserError(
            f"{where(table, row)} has {str(table[column][row].as_py())[:60]} in {column}, where the training data has "
            f"0 or 1 for each of {width} labels: write such a list"
        )
    return marks.reshape(table.num_rows, width)


def _refuse_missing(table: pa.Table, column: str, missing: pa.Array, rows: np.ndarray) -> None:
    if len(found := np.flatnonzero(missing)):
        count = len(np.unique(rows[found]))
        such = f" ({count:,} such rows)" if count > 1 else ""
        raise UserError(f"{where(table, rows[found[0]])} has no label in {column}{such}: {FILL_IN}")


def _is_whole(cells: pa.Array) -> np.ndarray:
    numbers = cells.to_numpy()
    return (numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53)


def _texts(cells: pa.Array) -> pa.Array:
    """The labels as strings. Whole floats become integers: some programs store integers with gaps as floats."""
    if pa.types.is_floating(cells.type) and _is_whole(cells).all():
        cells = cells.cast(pa.int64())
    return cells.cast(pa.string())


def _numbers(table: pa.Table, column: str, cells: pa.Array) -> np.ndarray:
    """float64 [N]; UserError for a number that is not finite in float32, the type of the model's output."""
    numbers = cells.cast(pa.float64()).to_numpy()
    with np.errstate(over="ignore"):  # an overflow gives infinity, which is refused
        finite = np.isfinite(numbers.astype(np.float32))
    if len(infinite := np.flatnonzero(~finite)):
        row = int(infinite[0])
        raise UserError(f"{where(table, row)} has {cells[row]} in {column}, not finite in float32: correct the row")
    return numbers


def class_names(table: pa.Table, column: str) -> tuple[str, ...]:
    """The names that `datasets` stores in the metadata of a column of ClassLabels or lists of them; otherwise ()."""
    type_ = table.schema.field(column).type
    if not pa.types.is_integer(getattr(type_, "value_type", type_)):
        return ()
    feature = of_datasets.feature(table, column)
    feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)  # three ways to write a list
    if not of_datasets.is_class_label(feature):
        return ()
    return tuple(feature.get("names") or map(str, range(feature.get("num_classes") or 0)))


def _names_of_ids(
    table: pa.Table, column: str, cells: pa.Array, rows: np.ndarray, classes: tuple[str, ...]
) -> pa.Array:
    """The names of ClassLabel ids; UserError for an id without a name."""
    numbers = cells.cast(pa.int64()).to_numpy()
    if len(nameless := np.flatnonzero((numbers < 0) | (numbers >= len(classes)))):
        found = f"{where(table, rows[nameless[0]])} has {numbers[nameless[0]]} in {column}"
        raise UserError(f"{found}, but its ClassLabel has names for 0 to {len(classes) - 1} only: correct the row")
    return pa.array(classes).take(pa.array(numbers))


def _are_numbers(texts: Sequence[str]) -> bool:
    return all(text.removeprefix("-").isdecimal() for text in texts)
