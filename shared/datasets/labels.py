"""Label columns of a table as targets of a loss: class ids, label vectors or numbers."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal
from unicodedata import normalize

import numpy as np
import pyarrow as pa

from shared.compat.of_datasets import class_names
from shared.datasets.label_columns import (
    FLAG,
    array_of_blocks,
    cells_of,
    is_fraction,
    is_number,
    labels_in,
    marks_of,
    names_of_ids,
    numbers_in,
    refuse_equal,
    refuse_outliers,
)
from shared.datasets.readers import is_list
from shared.datasets.rows import INTEGER, blocks_of, column_of, decided, is_text, reading_in, source_of, where
from shared.datasets.tables import read_parts, split
from shared.demo_data import texts as demo_texts
from shared.errors import UserError, count_of, listed, say
from shared.pretrained.from_pretrained import label_order

Kind = Literal["classification", "multi_label", "regression"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]

KINDS: dict[ProblemType, Kind] = {
    "single_label_classification": "classification",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
NEEDS: dict[Kind, str] = {
    "classification": "one label",
    "multi_label": "a list of labels, several columns or --label_delimiter",
    "regression": "one number",
}
FORMAT = 2  # part of the cache's names: increase it when the targets of the same rows change
MAX_CLASSES = 100  # with more, and fewer than two rows per class on average, the values are probably not classes


@dataclass(frozen=True)
class Labels:
    """The meaning of the label columns: learned from the training table and applied to every table."""

    kind: Kind
    columns: tuple[str, ...]  # of several, each contains 0 or 1 for one label
    names: tuple[str, ...] = ()  # the classes or labels in the order of the model's outputs; empty for regression
    values: tuple[str, ...] = ()  # the value in the column for each name, as text
    named: bool = False  # whether `names` come from a ClassLabel of `datasets`, and `values` are its ids
    vectors: bool = False  # whether the column contains lists with 0 or 1 for each label
    delimiter: str | None = None  # separates the labels of a row in a text column

    def __str__(self) -> str:
        names = f": {listed(self.names, 10)}" if self.names else ""
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
            UserError: a column does not exist, its values do not fit `problem_type` or `delimiter`, a label of the only
                column is missing, there are fewer than two classes, or each row has the same number.
        """
        columns = (column,) if isinstance(column, str) else tuple(column)
        _refuse_contradictions(columns, problem_type, delimiter)
        table, kind, cell = _decided(table, columns, problem_type and KINDS[problem_type], delimiter)
        if len(columns) > 1:
            return cls(kind, columns, columns, columns)
        if kind != "regression":
            return cls.of_column(table, columns[0], kind, cell, delimiter)
        labels = cls(kind, columns)
        refuse_equal(table, columns[0], labels.encode(table))  # which finds all errors
        return labels

    @classmethod
    def of_column(cls, table: pa.Table, column: str, kind: Kind, cell: pa.DataType, delimiter: str | None) -> "Labels":
        """Learn the labels of one column, whose cells, or the values in whose lists, have the type `cell`."""
        source = f"{FLAG} {column}: {source_of(table)}"
        first_rows, least, most = labels_in(table, column, delimiter)
        distinct, classes = [*first_rows], class_names(table, column)
        if is_fraction(cell) and (others := [label for label in distinct if not re.match(INTEGER, label)]):
            row = where(table, first_rows[others[0]])
            fix = "write 0 or 1 for each label" if kind == "multi_label" else "use --problem_type regression"
            raise UserError(f"{row} has {others[0]} in {column}, which is not a class: {fix}")
        if delimiter is not None and most < 2:
            raise UserError(
                f"--label_delimiter {delimiter} separates labels in no row of {source_of(table)} ({column}: "
                f"{listed(distinct)}): use the text that separates two labels"
            )
        same_width = kind == "multi_label" and least == most > 1
        if same_width and delimiter is None and not classes and not is_text(cell) and min(marks_of(distinct)) >= 0:
            names = tuple(map(str, range(most)))
            return cls(kind, (column,), names, names, vectors=True)
        if len(distinct) < 2:
            raise UserError(f"{source} has fewer than two classes ({', '.join(distinct) or 'none'}): add another")
        if classes:
            return cls(kind, (column,), classes, tuple(map(str, range(len(classes)))), named=True)
        if kind == "classification" and len(distinct) > max(MAX_CLASSES, table.num_rows / 2):
            raise UserError(
                f"{source} has {len(distinct):,} different values in {table.num_rows:,} rows, too many for classes: "
                "use another column, or --problem_type regression if the labels are numbers"
            )
        shown: dict[str, str] = {}  # each as a reader sees it
        for name in distinct:
            if (other := shown.setdefault(normalize("NFC", name).strip(), name)) != name:
                how = "white space or Unicode normalization"
                raise UserError(f"{source} has {other!r} and {name!r}, which differ in {how}: make them equal")
        in_order = (lambda value: (int(value), value)) if all(re.match(INTEGER, v) for v in distinct) else None
        values = tuple(sorted(distinct, key=in_order))
        return cls(kind, (column,), values, values, delimiter=delimiter)

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
        if self.kind == "regression":
            return numbers_in(table, self.columns[0])
        table, _, _ = _decided(table, self.columns, self.kind, self.delimiter)
        readings = [reading_in(table, name) for name in self.columns]
        return array_of_blocks(table, self.target_blocks(table), FORMAT, self.columns, repr(self), readings)

    def target_blocks(self, table: pa.Table) -> Iterator[np.ndarray]:
        """The classes or labels of each block of a table, after those of no row, which have the type."""
        blocks = chain([table.slice(0, 0)], blocks_of(table))
        if self.vectors or len(self.columns) > 1:
            return map(self._marks, blocks)
        first_rows, _, _ = labels_in(table, self.columns[0], self.delimiter)
        ids = self._ids(table, self.columns[0], first_rows)
        return (self._known(block, ids) for block in blocks)

    def _known(self, block: pa.Table, ids: dict[str, int]) -> np.ndarray:
        """Class ids, or float32 [N, num_labels] of 0 and 1, from the id of each text."""
        texts, places, rows = cells_of(block, self.columns[0], self.delimiter)
        found = np.array([ids[text] for text in texts], np.int64)[places]
        if self.kind == "classification":
            return found
        targets = np.zeros((block.num_rows, self.num_labels), np.float32)
        targets[rows, found] = 1
        if np.count_nonzero(targets) < len(rows):
            first = np.unique(rows * self.num_labels + found, return_index=True)[1]
            repeated = np.delete(np.arange(len(rows)), first)[0]
            raise UserError(
                f"{where(block, int(rows[repeated]))} has the label {self.names[found[repeated]]} twice in "
                f"{self.columns[0]}: write either the labels of each row as a list, or in all rows 0 or 1 for each "
                "label"
            )
        return targets

    def _marks(self, block: pa.Table) -> np.ndarray:
        """float32 [N, num_labels] of the 0 and 1 in vectors, or in several columns; UserError for a row with others."""
        cells = [cells_of(block, name) for name in self.columns]
        rows = cells[0][2]
        marks = np.stack([np.array(marks_of(texts), np.float32)[places] for texts, places, _ in cells], axis=1)
        wrong = np.bincount(rows, minlength=block.num_rows) != self.num_labels / len(cells)
        wrong[rows[(marks < 0).any(axis=1)]] = True
        if wrong.any():
            row = int(wrong.argmax())
            found = [texts[place] for texts, places, _ in cells for place in places[rows == row]]
            raise UserError(
                f"{where(block, row)} has [{', '.join(found)}] in {' '.join(self.columns)}: write 0 or 1 for each of "
                f"the {self.num_labels} labels"
            )
        order = [self.columns.index(value) if len(self.columns) > 1 else int(value) for value in self.values]
        return marks.reshape(-1, self.num_labels)[:, order]

    def _ids(self, table: pa.Table, column: str, first_rows: dict[str, int]) -> dict[str, int]:
        """The id of the class or label that each text means; `first_rows` has the first row with it.

        Names are compared with names. If only one of this table and training has the names of a ClassLabel, the values
        of the other may be its names or its ids; the interpretation that fits is used.
        """
        # Compared as text: the inferred type of a small validation file may differ (1, 2; in training 1, 2, "none").
        texts = [*first_rows]
        classes, called = class_names(table, column), texts
        if classes:
            numbers, at = np.array([*map(int, texts)], np.int64), np.array([*first_rows.values()], np.int64)
            called = names_of_ids(table, column, numbers, at, classes).to_pylist()
        by_name, by_value = (dict(zip(known, range(len(known)), strict=True)) for known in (self.names, self.values))
        found = {text: by_name[name] for text, name in zip(texts, called, strict=True) if name in by_name}
        if self.named != bool(classes) and all(text in by_value for text in texts):
            by_number = {text: by_value[text] for text in texts}
            if len(found) < len(texts):
                found = by_number
                meant = listed([f"{number} is {name}" for number, name in enumerate(classes or self.names)])
                with_names = source_of(table) if classes else "the training data"
                say(f"{source_of(table)}: only {with_names} has names of labels: matched by number ({meant})")
            elif found != by_number:
                raise UserError(
                    f"{FLAG} {column}: the numbers of {source_of(table)} can be names or numbers of classes, because "
                    f"only one of it and the training data (with {listed(self.names)}) has a ClassLabel: save both "
                    "with a ClassLabel, or neither"
                )
        if unknown := {text: name for text, name in zip(texts, called, strict=True) if text not in found}:
            raise UserError(
                f"{where(table, first_rows[next(iter(unknown))])} has a label in {column} that training does not have "
                f"(unknown: {listed([*dict.fromkeys(unknown.values())])}; known: {listed(self.names)}): correct such "
                "rows, or add rows with these labels to the training data"
            )
        return found


def _refuse_contradictions(columns: tuple[str, ...], problem_type: ProblemType | None, delimiter: str | None) -> None:
    """Raise UserError if flags about labels contradict each other."""
    given = f"{FLAG} {' '.join(columns)}" + ("" if delimiter is None else f" --label_delimiter '{delimiter}'")
    several = (len(columns) > 1) + (delimiter is not None)
    other_type = several and problem_type not in (None, "multi_label_classification")
    if len({*columns}) < len(columns) or delimiter == "" or several > 1 or other_type:
        raise UserError(
            f"{given}: use different columns of 0 and 1, or one text column with a delimiter; both give a row several "
            "labels, for --problem_type multi_label_classification"
        )


def _decided(
    table: pa.Table, columns: Sequence[str], wanted: Kind | None, delimiter: str | None
) -> tuple[pa.Table, Kind, pa.DataType]:
    """The table with a decided type of the label column of a CSV file, and the kind of the labels: `wanted`, if given.

    Several columns and texts with a delimiter stay undecided. The third value is the type of a label.

    Raises:
        UserError: a column does not exist or does not fit the kind, or see `decided`.
    """
    marks = len(columns) > 1 or delimiter is not None
    if not marks:
        table = decided(table, columns[0], wanted)
    for name in columns:
        type_ = column_of(table.slice(0, 0), name, FLAG).type
        cell = type_.value_type if is_list(type_) else type_
        found = f"{FLAG} {name}: {source_of(table)} contains {type_}"
        if not (is_number(cell) or is_text(cell) or pa.types.is_boolean(cell)):
            raise UserError(f"{found}: labels are strings, numbers, booleans, or lists of them")
        usual: Kind = "multi_label" if is_list(type_) else "regression" if is_fraction(cell) else "classification"
        kind = "classification" if marks else wanted or usual
        if is_list(type_) != (kind == "multi_label") or (kind == "regression" and not is_number(cell)):
            if delimiter is not None:
                raise UserError(f"{found}, but --label_delimiter splits texts: use --label_delimiter None")
            raise UserError(f"{found}, but {kind} needs {NEEDS[kind]} for each row: see --problem_type")
    return table, "multi_label" if marks else kind, cell


def load_labeled(config: Any) -> tuple[pa.Table, pa.Table, Labels]:
    """The training rows, the validation rows and the labels, in the order of the pretrained model's outputs.

    Without validation data, --validation_split_percentage of each label's rows are held out, chosen by --seed.

    Raises:
        UserError: the data cannot be read, or the labels cannot be learned; or see `refuse_equal` and
            `refuse_outliers`.
    """
    texts, columns, kind = config.text_column_names, config.label_column_name, config.problem_type
    tables = read_parts(config, texts, columns, kind, embedded=("the embedded docstrings", demo_texts.load))
    labels = Labels.from_table(tables[0], columns, kind, config.label_delimiter)
    train, validation = split(tables, config, labels.encode)
    if config.model_name_or_path and labels.names:
        labels = labels.ordered(label_order(config.model_name_or_path, labels.names, config.revision))
    if labels.kind == "regression":
        numbers = labels.encode(train)
        refuse_equal(train, labels.columns[0], numbers)  # the only other number may be held out
        refuse_outliers(train, labels.columns[0], numbers)
    return train, validation, labels
