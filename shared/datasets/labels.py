"""Label columns of a table as targets of a loss: class ids, label vectors or numbers."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shared.datasets.label_cells import (
    FLAG,
    TOO_MANY,
    Kind,
    cells_of,
    class_names,
    contains_delimiter,
    distinct_rows,
    is_whole,
    kind_of_column,
    names_of_ids,
    numbers_of,
    refuse_outliers,
    stored_targets,
    texts_of,
    vector_width,
    vectors_of,
    zero_one_column,
    zeros_and_ones,
)
from shared.datasets.rows import INTEGER, column_of, content_of, named, refuse_missing, source_of, where, with_labels
from shared.datasets.tables import limited, load_tables
from shared.demo_data import texts
from shared.errors import UserError, count_of, listed, say
from shared.pretrained.from_pretrained import label_order

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

KINDS: dict[ProblemType, Kind] = {
    "single_label_classification": "classification",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
MAX_CLASSES = 100  # with more, and fewer than two rows per class on average, the values are probably not classes


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
        return f"{self.kind}, {count_of(self.num_labels, 'label')}{names}"

    @property
    def num_labels(self) -> int:
        """The number of outputs of the model: one for each class or label; one for regression."""
        return len(self.names) or 1

    @property
    def problem_type(self) -> ProblemType:
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
        _refuse_contradictions(columns, problem_type, delimiter)
        wanted = problem_type and KINDS[problem_type]
        rows = table.num_rows
        table = _decided(table, columns, wanted, delimiter)
        if len(columns) > 1:
            few = distinct_rows(table, columns)
            return cls("multi_label", columns, columns, columns)._checked_not_constant(few, rows)
        column = columns[0]
        source = f"{FLAG} {column}: {source_of(table)}"
        kind: Kind = "multi_label"
        if delimiter is None:
            kind = kind_of_column(column_of(table.slice(0, 0), column, FLAG).type, wanted, source)
        if kind == "regression":
            labels = cls(kind, column)
            labels.encode(table)  # finds all errors
            return labels
        return cls.of_rows(distinct_rows(table, columns), rows, column, kind, delimiter)

    @classmethod
    def of_rows(cls, table: pa.Table, all_rows: int, column: str, kind: Kind, delimiter: str | None) -> "Labels":
        """Learn the labels of one column; `table` has all its different cells, which stand for `all_rows` rows."""
        source = f"{FLAG} {column}: {source_of(table)}"
        cells, rows = cells_of(table, column, kind, delimiter)
        if pa.types.is_floating(cells.type) and len(fractional := np.flatnonzero(~is_whole(cells))):
            found = f"{where(table, rows[fractional[0]])} has {cells[fractional[0]]} in {column}"
            raise UserError(f"{found}, which is not a class: use --problem_type regression")
        distinct = texts_of(cells).unique().to_pylist()
        if delimiter is not None and not contains_delimiter(table, column, delimiter):
            raise UserError(
                f"--label_delimiter {delimiter} is in no row of {source_of(table)} ({column}: {listed(distinct)}): "
                "use the text that separates two labels"
            )
        classes = class_names(table, column)
        width = vector_width(cells, rows, table) if kind == "multi_label" and delimiter is None and not classes else 0
        if width:
            if width == 2 and (np.bincount(rows, zeros_and_ones(cells) == 1) == 1).all():
                say(f"{source} has only [0, 1] and [1, 0]: read as 0 or 1 for each of two labels, not as label ids")
            names = tuple(map(str, range(width)))
            return cls(kind, column, names, names, vectors=True)._checked_not_constant(table, all_rows)
        if len(distinct) < 2:
            raise UserError(f"{source} has fewer than two classes ({', '.join(distinct) or 'none'}): add another")
        if classes:
            labels = cls(kind, column, classes, tuple(map(str, range(len(classes)))), named=True)
        else:
            if kind == "classification" and len(distinct) > max(MAX_CLASSES, all_rows / 2):
                raise UserError(f"{source} has {len(distinct):,} different values in {all_rows:,} rows, {TOO_MANY}")
            _refuse_equal_up_to_space(distinct, source)
            in_order = (lambda value: (int(value), value)) if all(re.match(INTEGER, v) for v in distinct) else None
            values = tuple(sorted(distinct, key=in_order))
            labels = cls(kind, column, values, values, delimiter=delimiter)
        return labels._checked_not_constant(table, all_rows) if kind == "multi_label" else labels

    def ordered(self, names: tuple[str, ...]) -> "Labels":
        """The same labels in the order of `names`, a permutation of the names of these labels."""
        assert sorted(names) == sorted(self.names), f"{names} are not {self.names}"
        places = [self.names.index(name) for name in names]
        return replace(self, names=names, values=tuple(self.values[place] for place in places))

    def encode(self, table: pa.Table) -> np.ndarray:
        """The targets of the rows: int64 [N] class ids, float32 [N, num_labels] of 0 and 1, or float64 [N] numbers.

        Those of a memory-mapped table are memory-mapped.

        Raises:
            UserError: a label is missing, unknown in training or not finite in float32 (names the row); or the labels
                of this table do not match those of training, or match them in two ways.
        """
        if not content_of(table):
            return self._encode(table)
        columns = (self.column,) if isinstance(self.column, str) else self.column
        table = _decided(table, columns, self.kind, self.delimiter)
        return stored_targets(table, columns, self.kind == "regression", self._encode, repr(self))

    def _encode(self, table: pa.Table) -> np.ndarray:
        """The targets of the rows of a table in memory."""
        if isinstance(self.column, tuple):
            columns = [zero_one_column(table, name) for name in self.values]
            return np.stack(columns, 1).astype(np.float32)
        source = f"{FLAG} {self.column}: {source_of(table)}"
        if self.delimiter is None:
            kind_of_column(column_of(table, self.column, FLAG).type, self.kind, source)
        cells, rows = cells_of(table, self.column, self.kind, self.delimiter)
        if self.kind == "regression":
            return numbers_of(table, self.column, cells)
        if self.vectors:
            marks = vectors_of(table, self.column, cells, rows, self.num_labels)
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
        texts = texts_of(cells)
        classes = class_names(table, column)
        called = texts
        if classes:
            called = names_of_ids(table, column, cells.cast(pa.int64()).to_numpy(), rows, classes)
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
            refuse_missing(table, column, pc.equal(texts, "-1"), rows)
        if len(unknown := np.flatnonzero(found.is_null())):
            others = called.take(pa.array(unknown)).unique().to_pylist()
            if len(unknown) == len(called) and _are_numbers(others) != _are_numbers(self.names):
                raise UserError(
                    f"{source_of(table)} has the labels {listed(others)} in {column}, and the training data has "
                    f"{listed(self.names)}: write numbers in both, or names in both"
                )
            raise UserError(
                f"{where(table, rows[unknown[0]])} has a label in {column} that training does not have "
                f"(unknown: {listed(others)}; known: {listed(self.names)}): remove such rows, or add rows with these "
                "labels to the training data"
            )
        return found.to_numpy().astype(np.int64)

    def _checked_not_constant(self, table: pa.Table, all_rows: int) -> "Labels":
        """These multi-label labels, after a check that the rows of the training table differ in them.

        Raises:
            UserError: every row has the same labels; or see `encode`.
        """
        targets = self.encode(table)
        if all_rows > 1 and (targets == targets[0]).all():
            names = self.column if isinstance(self.column, str) else " ".join(self.column)
            raise UserError(f"{FLAG} {names}: every row of {source_of(table)} has the same labels: add other rows")
        return self


def _refuse_contradictions(columns: tuple[str, ...], problem_type: ProblemType | None, delimiter: str | None) -> None:
    """Raise UserError if flags about labels contradict each other."""
    given = f"{FLAG} {' '.join(columns)}" + ("" if delimiter is None else f" --label_delimiter '{delimiter}'")
    if len({*columns}) < len(columns) or delimiter == "" or (len(columns) > 1 and delimiter is not None):
        raise UserError(f"{given}: use different columns of 0 and 1, or one text column with a delimiter")
    several = len(columns) > 1 or delimiter is not None
    if several and problem_type not in (None, "multi_label_classification"):
        raise UserError(f"{given} gives a row several labels, but --problem_type {problem_type} allows one")


def _decided(table: pa.Table, columns: Sequence[str], kind: Kind | None, delimiter: str | None) -> pa.Table:
    """The table with a decided type of the label column of a CSV file; several columns and texts stay undecided.

    Raises:
        UserError: a column does not exist, or see `with_labels`.
    """
    for name in columns:
        column_of(table.slice(0, 0), name, FLAG, as_text=True)
    if len(columns) > 1 or delimiter is not None:
        return table
    return with_labels(table, None, columns[0], "regression" if kind == "regression" else None)[0]


def _refuse_equal_up_to_space(names: Sequence[str], source: str) -> None:
    """Raise UserError if two names differ in outer white space only."""
    by_text: dict[str, str] = {}
    for name in names:
        if (other := by_text.setdefault(name.strip(), name)) != name:
            raise UserError(
                f"{source} has the labels {other!r} and {name!r}, which differ in white space: make them equal"
            )


def _are_numbers(texts: Sequence[str]) -> bool:
    return all(text.removeprefix("-").isdecimal() for text in texts)


def embedded_docstrings() -> list[pa.Table]:
    """The default data: docstrings, each with the library that it comes from."""
    return [named(table, "the embedded docstrings") for table in texts.load()]


def load_labeled(config: Any) -> tuple[pa.Table, pa.Table, Labels]:
    """The training rows, the validation rows and the labels, in the order of the pretrained model's outputs.

    Without validation data, --validation_split_percentage of each label's rows are held out, chosen by --seed.

    Raises:
        UserError: the data cannot be read, or the labels cannot be learned; or see `refuse_outliers`.
    """

    def learn(table: pa.Table) -> Labels:
        return Labels.from_table(table, config.label_column_name, config.problem_type, config.label_delimiter)

    columns, label_columns = config.text_column_names, config.label_column_name
    train, validation = load_tables(
        config, columns, label_columns, config.problem_type, lambda t: learn(t).encode(t), embedded_docstrings
    )
    labels = learn(train)
    if config.model_name_or_path and labels.names:
        labels = labels.ordered(label_order(config.model_name_or_path, labels.names, config.revision))
    train, validation = limited((train, validation), config)
    if labels.kind == "regression":
        refuse_outliers(train, str(labels.column), labels.encode(train))
    return train, validation, labels
