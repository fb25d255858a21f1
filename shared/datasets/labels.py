"""The label columns of a table, whatever they hold, as targets for a loss: class ids, label vectors or numbers."""

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
MOST_CLASSES = 100  # beyond these, classes of fewer than two rows on average are taken for ids or numbers
MARKS = {"0": 0, "1": 1, "false": 0, "true": 1}  # what a column of one label holds, in lower case


@dataclass(frozen=True)
class Labels:
    """What the label columns mean: learned from the training table, applied to every table."""

    kind: Kind
    column: str | tuple[str, ...]  # several columns: each holds 0 or 1 for one label
    names: tuple[str, ...] = ()  # of the classes or labels, in the order of the model's outputs; none for regression
    values: tuple[str, ...] = ()  # what the column holds for each of them, as text
    named: bool = False  # the names are those of a ClassLabel of `datasets`, and the values its numbers
    vectors: bool = False  # the column holds lists of 0 and 1, one for each label
    delimiter: str | None = None  # what stands between the labels of a text

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
    def from_table(
        cls,
        table: pa.Table,
        column: str | Sequence[str],
        problem_type: ProblemType | None = None,
        delimiter: str | None = None,
    ) -> "Labels":
        """What the label column, or the columns, of the training table mean.

        Strings, integers and booleans are classes, floats are numbers to be predicted, lists are several labels at
        once; `problem_type` overrules that where the values allow it. The classes are those found, sorted, unless
        `datasets` has left the names of all of them in the metadata. A list holds the labels of its row, or 0 or 1 for
        each label there is. Several columns are labels of their names, 0 or 1 in each row. With a `delimiter` the
        column is text, and holds the labels of its row with it between them.

        Raises:
            UserError: there is no such column, it cannot be what `problem_type` or `delimiter` says, a label is
                missing, there are fewer than two classes, or each row has the same labels.
        """
        columns = (column,) if isinstance(column, str) else tuple(column)
        several = _several(columns, problem_type, delimiter)
        if len(columns) > 1:
            labels = cls("multi_label", columns, columns, columns)
            return labels._that_differ(table)
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
            raise UserError(f"{found}, which is no class: use --problem_type regression")
        distinct = _texts(cells).unique().to_pylist()
        if delimiter is not None and not _is_separated(table, column, delimiter):
            raise UserError(
                f"--label_delimiter {delimiter} is in no row of {source_of(table)} ({column}: {listed(distinct)}): "
                "give what stands between two labels"
            )
        classes = _class_names(table, column)
        if kind == "multi_label" and not several and not classes and (width := _vector_width(cells, rows, table)):
            if width == 2 and (np.bincount(rows, _marks(cells) == 1) == 1).all():
                say(f"{source} holds [0, 1] and [1, 0] only: read as 0 or 1 for each of two labels, not as their ids")
            names = tuple(map(str, range(width)))
            return cls(kind, column, names, names, vectors=True)._that_differ(table)
        if len(distinct) < 2:
            raise UserError(f"{source} has fewer than two classes ({', '.join(distinct) or 'none'}): nothing to learn")
        if classes:
            numbers = tuple(map(str, range(len(classes))))
            labels = cls(kind, column, classes, numbers, named=True)
            return labels._that_differ(table) if kind == "multi_label" else labels
        if len(distinct) > max(MOST_CLASSES, table.num_rows / 2) and kind == "classification":
            raise UserError(
                f"{source} has {len(distinct):,} different values in {table.num_rows:,} rows, too many for classes: "
                "give another column, or --problem_type regression if it holds numbers"
            )
        by_text: dict[str, str] = {}
        for text in distinct:
            if (other := by_text.setdefault(text.strip(), text)) != text:
                raise UserError(
                    f"{source} has the labels {other!r} and {text!r}, which differ in white space: make one"
                )
        in_order = (lambda value: (int(value), value)) if all(re.match(INTEGER, v) for v in distinct) else None
        values = tuple(sorted(distinct, key=in_order))
        labels = cls(kind, column, values, values, delimiter=delimiter)
        return labels._that_differ(table) if kind == "multi_label" else labels

    def ordered(self, names: tuple[str, ...]) -> "Labels":
        """The same labels in another order: of `names`, which are these names."""
        assert sorted(names) == sorted(self.names), f"{names} are not {self.names}"
        places = [self.names.index(name) for name in names]
        return replace(self, names=names, values=tuple(self.values[place] for place in places))

    def encode(self, table: pa.Table) -> np.ndarray:
        """The targets of the rows: int64 [N] class ids, float32 [N, num_labels] of 0 and 1, or float64 [N] numbers.

        Raises:
            UserError: names the row with a label that is missing, unknown to training, or not finite in float32; or
                says that the labels of this table and of training can be matched in no way, or in two.
        """
        if isinstance(self.column, tuple):
            columns = [_column_of_marks(table, name) for name in self.values]
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
                f"{where(table, row)} has the label {self.names[label]} twice in {self.column}: a list holds the "
                "labels of its row, or, in all rows alike, 0 or 1 for each label there is"
            )
        return targets

    def _ids(self, table: pa.Table, column: str, cells: pa.Array, rows: np.ndarray) -> np.ndarray:
        """int64, the class or label that each cell means.

        Names are compared with names. Where only one of this table and training has the names of a ClassLabel, what the
        other holds may be its names or its numbers, and is taken for what it can be.
        """
        # As text, because a small validation file may show another type: 1, 2 where training has 1, 2, "none".
        texts = _texts(cells)
        classes = _class_names(table, column)
        called = _called(table, column, cells, rows, classes) if classes else texts
        found = pc.index_in(called, pa.array(self.names))
        by_number = pc.index_in(texts, pa.array(self.values))
        if self.named != bool(classes) and by_number.null_count == 0:
            if found.null_count:
                found = by_number
                meant = ", ".join(f"{number} is {name}" for number, name in list(enumerate(classes or self.names))[:5])
                if classes:
                    say(f"{source_of(table)} names its labels and training does not: their numbers count ({meant})")
                else:
                    say(f"{source_of(table)} has numbers in {column} where training has names: read as {meant}")
            elif not found.equals(by_number):
                raise UserError(
                    f"{FLAG} {column}: the numbers of {source_of(table)} can be names or numbers of classes, and only "
                    f"one of it and the training data (with {listed(self.names)}) says which: give both a ClassLabel, "
                    "or neither"
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
                f"(unknown: {listed(others)}; known: {listed(self.names)}): leave such rows out, or add some to the "
                "training data"
            )
        return found.to_numpy().astype(np.int64)

    def _that_differ(self, table: pa.Table) -> "Labels":
        """These several labels, which not every row of the training table has alike.

        Raises:
            UserError: it has; or as `encode`.
        """
        targets = self.encode(table)
        if len(targets) > 1 and (targets == targets[0]).all():
            names = self.column if isinstance(self.column, str) else " ".join(self.column)
            raise UserError(f"{FLAG} {names}: every row of {source_of(table)} has the same labels: nothing to learn")
        return self


def _several(columns: tuple[str, ...], problem_type: ProblemType | None, delimiter: str | None) -> bool:
    """Whether settings say that a row has several labels; UserError if they contradict each other."""
    given = f"{FLAG} {' '.join(columns)}"
    if len(columns) != len(set(columns)):
        raise UserError(f"{given} names a column twice: leave one out")
    if delimiter == "":
        raise UserError("--label_delimiter '' separates nothing: give what stands between two labels, such as ,")
    if delimiter is not None:
        if len(columns) > 1:
            raise UserError(
                f"{given} with --label_delimiter {delimiter}: give one column of texts, or columns of 0 and 1"
            )
        given = f"--label_delimiter {delimiter}"
    several = len(columns) > 1 or delimiter is not None
    if several and problem_type not in (None, "multi_label_classification"):
        raise UserError(
            f"{given} gives a row several labels, which --problem_type {problem_type} has not: leave one out"
        )
    return several


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
        needs = (
            "a list of labels for each row, several columns or --label_delimiter"
            if kind == "multi_label"
            else "one label for each row"
        )
        raise UserError(f"{source} holds {type_}, but {kind} needs {needs}: see --problem_type")
    if kind == "regression" and not (is_number or pa.types.is_null(type_)):
        raise UserError(f"{source} holds {type_}, but regression needs numbers: see --problem_type")
    return kind


def _cells(table: pa.Table, column: str, kind: Kind, delimiter: str | None = None) -> tuple[pa.Array, np.ndarray]:
    """The labels of all rows one after the other, and the row of each; UserError for the first that is missing.

    Between delimiters nothing is missing: a row with an empty text has no label.
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
    if _class_names(table, column):  # the Hub's way to say that the labels of a test split are not published
        _refuse_missing(table, column, pc.equal(cells, -1), rows)
    return cells, rows


def _is_separated(table: pa.Table, column: str, delimiter: str) -> bool:
    """Whether the delimiter is in any row."""
    texts = column_of(table, column, FLAG, as_text=True).cast(pa.string())
    return pc.any(pc.match_substring(texts, delimiter)).as_py() or False


def _marks(cells: pa.Array) -> np.ndarray:
    """int64, 0 or 1 for each cell that says so, and -1 for any other."""
    texts = pc.utf8_lower(pc.utf8_trim_whitespace(_texts(cells)))
    found = pc.index_in(texts, pa.array(list(MARKS)))
    return np.array([*MARKS.values(), -1])[np.asarray(pc.fill_null(found, -1))]


def _column_of_marks(table: pa.Table, column: str) -> np.ndarray:
    """int64 [N], the 0 and 1 of one label's column; UserError for a row that has something else."""
    _kind(column_of(table, column, FLAG).type, "classification", f"{FLAG} {column}: {source_of(table)}")
    cells, _ = _cells(table, column, "classification")
    marks = _marks(cells)
    if len(others := np.flatnonzero(marks < 0)):
        row = int(others[0])
        raise UserError(
            f"{where(table, row)} has {cells[row]} in {column}: of several label columns each holds 0 or 1, which says "
            "whether the row has the label of its name"
        )
    return marks


def _vector_width(cells: pa.Array, rows: np.ndarray, table: pa.Table) -> int:
    """How many 0 and 1 each row's list holds, where all lists are such vectors of two or more; else 0."""
    widths = np.bincount(rows, minlength=table.num_rows)
    text = pa.types.is_string(cells.type)
    is_vector = not text and widths[0] > 1 and (widths == widths[0]).all() and (_marks(cells) >= 0).all()
    return int(widths[0]) if is_vector else 0


def _vectors(table: pa.Table, column: str, cells: pa.Array, rows: np.ndarray, width: int) -> np.ndarray:
    """int64 [N, width]; UserError for a row that is no vector of 0 and 1 of that width."""
    wrong = np.bincount(rows, minlength=table.num_rows) != width
    marks = _marks(cells)
    wrong[rows[marks < 0]] = True
    if len(found := np.flatnonzero(wrong)):
        row = int(found[0])
        raise UserError(
            f"{where(table, row)} has {str(table[column][row].as_py())[:60]} in {column}, where the training data has "
            f"0 or 1 for each of {width} labels: write it so"
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
    """The labels as strings; whole floats (integers that some program stored beside gaps) as integers."""
    if pa.types.is_floating(cells.type) and _is_whole(cells).all():
        cells = cells.cast(pa.int64())
    return cells.cast(pa.string())


def _numbers(table: pa.Table, column: str, cells: pa.Array) -> np.ndarray:
    """float64 [N]; UserError for a number that is not finite in float32, which is what a model gives."""
    numbers = cells.cast(pa.float64()).to_numpy()
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and is refused
        finite = np.isfinite(numbers.astype(np.float32))
    if len(infinite := np.flatnonzero(~finite)):
        row = int(infinite[0])
        raise UserError(f"{where(table, row)} has {cells[row]} in {column}, which is not finite in float32")
    return numbers


def _class_names(table: pa.Table, column: str) -> tuple[str, ...]:
    """The names that `datasets` keeps in the metadata for a column of ClassLabels or of lists of them; else none."""
    type_ = table.schema.field(column).type
    if not pa.types.is_integer(getattr(type_, "value_type", type_)):
        return ()
    feature = of_datasets.feature(table, column)
    feature = feature[0] if isinstance(feature, list) else feature.get("feature", feature)  # three ways to write a list
    if not of_datasets.is_class_label(feature):
        return ()
    return tuple(feature.get("names") or map(str, range(feature.get("num_classes") or 0)))


def _called(table: pa.Table, column: str, cells: pa.Array, rows: np.ndarray, classes: tuple[str, ...]) -> pa.Array:
    """The names of ClassLabels; UserError for a number that has none."""
    numbers = cells.cast(pa.int64()).to_numpy()
    if len(nameless := np.flatnonzero((numbers < 0) | (numbers >= len(classes)))):
        found = f"{where(table, rows[nameless[0]])} has {numbers[nameless[0]]} in {column}"
        raise UserError(f"{found}, but its ClassLabel has names for 0 to {len(classes) - 1} only: correct the row")
    return pa.array(classes).take(pa.array(numbers))


def _are_numbers(texts: Sequence[str]) -> bool:
    return all(text.removeprefix("-").isdecimal() for text in texts)
