"""Label columns become classes, sets of labels or numbers; unusable columns are refused."""

import numpy as np
import pyarrow as pa
import pytest
import runs
from runs import refusal
from table_files import class_labels, table_of

from shared.datasets.label_columns import refuse_outliers
from shared.datasets.labels import Labels, load_labeled
from shared.datasets.rows import FILL_IN
from shared.datasets.tables import named

CLASSES, SEVERAL = "single_label_classification", "multi_label_classification"
LISTS, NUMBERS = ([["b"], [], ["c", "a"]], [0, 1, -2])


@pytest.mark.parametrize(
    ("values", "type_", "asked", "found", "names", "targets"),
    [
        (["pos", "neg", "pos"], pa.string(), None, CLASSES, ("neg", "pos"), [1, 0, 1]),
        (["pos", "neg", "pos"], pa.dictionary(pa.int8(), pa.string()), None, CLASSES, ("neg", "pos"), [1, 0, 1]),
        ([10, 2, -1], pa.int64(), None, CLASSES, ("-1", "2", "10"), [2, 1, 0]),
        *(([9, 3, 3], type_, None, CLASSES, ("3", "9"), [1, 0, 0]) for type_ in (pa.uint8(), pa.decimal128(19, 0))),
        ([True, False, True], pa.bool_(), None, CLASSES, ("false", "true"), [1, 0, 1]),
        ([1.0, 10.0, 2.0], pa.float64(), CLASSES, CLASSES, ("1", "2", "10"), [0, 2, 1]),
        (LISTS, pa.list_(pa.string()), None, SEVERAL, ("a", "b", "c"), [[0, 1, 0], [0, 0, 0], [1, 0, 1]]),
        (LISTS, pa.large_list(pa.string()), None, SEVERAL, ("a", "b", "c"), [[0, 1, 0], [0, 0, 0], [1, 0, 1]]),
        (NUMBERS, pa.float32(), None, "regression", (), NUMBERS),
        (NUMBERS, pa.decimal128(21, 2), None, "regression", (), NUMBERS),
        (NUMBERS, pa.int64(), "regression", "regression", (), NUMBERS),
    ],
)
def test_the_type_of_the_column_or_problem_type_decides_what_labels_are(values, type_, asked, found, names, targets):
    table = named(pa.table({"label": pa.array(values).cast(type_)}), "x")
    labels = Labels.from_table(table, "label", asked)
    assert (labels.problem_type, labels.names, labels.num_labels) == (found, names, len(names) or 1)
    encoded = labels.encode(table)
    if names:
        other = labels.ordered(names[::-1])
        back = other.encode(table)
        assert (back[:, ::-1] if found == SEVERAL else len(names) - 1 - back).tolist() == targets
    assert encoded.dtype == {CLASSES: np.int64, SEVERAL: np.float32, "regression": np.float64}[found]
    assert encoded.tolist() == targets


# Invalid labels

OTHER_TYPES = [pa.timestamp("s"), pa.binary(), pa.struct([("a", pa.int64())])]
OTHER_TYPES += [pa.list_(type_) for type_ in OTHER_TYPES]


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b", None],
        ["a", "b", ""],
        [1, 2, None],
        [0.5, 1.0, float("nan")],
        [["a"], ["b"], None],
        [["a"], ["b"], ["a", None]],
        [["a"], ["b"], ["a", ""]],
    ],
)
def test_a_missing_label_is_named_by_its_row_in_training_and_validation(values):
    message = f"row 3 of --train_file a.csv has no label in label: {FILL_IN}"
    assert refusal(Labels.from_table, table_of(values), "label") == message
    assert refusal(Labels.from_table(table_of(values[:2]), "label").encode, table_of(values)) == message


FILE, COLUMN = "--train_file a.csv", "--label_column_name label"
LOOK_ALIKE = ("a", "a "), ("e\u0301", "\u00e9")
COLUMNS = named(pa.table({"a": [0, 1, 0], "b": [0, 2, 1], "c": [0, None, 1], "d": [[0], [1], [1]]}), FILE)


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        (class_labels(table_of([0, 1, -1, -1]), ["no", "yes"]), (), f"row 3 of {FILE} has no label"),
        ([1.0, 0.37], (CLASSES,), f"row 2 of {FILE} has 0.37 in label, which is not a class: use --problem_type regre"),
        ([[0.8, 0.2], [0, 1]], (), f"row 1 of {FILE} has 0.8 in label, which is not a class: write 0 or 1 for each la"),
        *((values, (), f"{COLUMN}: {FILE} has fewer than two classes") for values in (["a", "a"], [3, 3], [True])),
        *((values, (), f"{COLUMN}: {FILE} has fewer than two") for values in ([["a"], ["a"]], [[], []])),
        ([0.5, 0.5], (), f"{COLUMN}: every row of {FILE} has 0.5: add other rows"),
        *((pa.nulls(2, type_), (), f"{COLUMN}: {FILE} contains {type_}: labels are strings") for type_ in OTHER_TYPES),
        (list(range(150)), (), f"{COLUMN}: {FILE} has 150 different values in 150 rows, too many for classes"),
        *(([0.5, bad], (), f"row 2 of {FILE} has {bad:g} in label, not finite") for bad in (float("-inf"), 1e300)),
        *(([n, "b", m], (), f"{COLUMN}: {FILE} has '{n}' and '{m}', which differ in") for n, m in LOOK_ALIKE),
        (["a", "b"], ("regression",), f"{COLUMN}: {FILE} contains string, but regression needs one number"),
        ([1, 2], (SEVERAL,), f"{COLUMN}: {FILE} contains int64, but multi_label needs a list"),
        ([["a"], ["b"]], (CLASSES,), f"{COLUMN}: {FILE} contains list<item: string>, but classification needs one"),
        ([[1], [2]], ("regression",), f"{COLUMN}: {FILE} contains list<item: int64>, but regression needs one number"),
        ([[0, 0, 1], [1, 0]], (), f"row 1 of {FILE} has the label 0 twice"),
        (["a", "b"], (None, ","), f"--label_delimiter , separates labels in no row of {FILE} ("),
        (["a,a", "b"], (None, ","), f"row 1 of {FILE} has the label a twice"),
        (["a,b", "b"], (None, ""), f"{COLUMN} --label_delimiter '': use"),
        ([["a"], ["b"]], (None, ","), f"{COLUMN}: {FILE} contains list<item: string>, but --label_delimiter splits"),
        (COLUMNS, (None, ",", ["a", "b"]), "--label_column_name a b --label_delimiter ',': use"),
        (COLUMNS, ("regression", None, ["a", "b"]), "--label_column_name a b: use different columns"),
        (COLUMNS, (None, None, ["a", "a"]), "--label_column_name a a: use different columns"),
        (COLUMNS, (None, None, ["a", "b"]), f"row 2 of {FILE} has [1, 2] in a b: write 0 or 1 for each of"),
        (COLUMNS, (None, None, ["a", "c"]), f"row 2 of {FILE} has no label in c"),
        (COLUMNS, (None, None, ["a", "e"]), f"--label_column_name e: {FILE} has no such column"),
        (COLUMNS, (None, None, ["a", "d"]), f"--label_column_name d: {FILE} contains list<"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(values, settings, expected):
    table = values if isinstance(values, pa.Table) else table_of(values)
    problem_type, delimiter, columns = (*settings, None, None, None)[:3]

    def read():
        return Labels.from_table(table, columns or "label", problem_type, delimiter).encode(table)

    assert refusal(read).startswith(expected)


@pytest.mark.parametrize(
    ("train", "validation", "expected"),
    [
        (["1", "2", "none"], [2, 1], [1, 0]),
        ([1, 2], ["2", "1"], [1, 0]),
        ([1, 2], ["2", "none"], "(unknown: none; known: 1, 2)"),
        ([True, False], [0, 1], "(unknown: 0, 1; known: false, true)"),
        ([0.5, 1.0], ["a", "b"], "contains string, not numbers"),
        (
            ["a", "b"],
            ["a", "z", "b", "y", "z", "x", "w", "v", "u"],
            "row 2 of v has a label in label that training does not have (unknown: z, y, x, w, v and 1 more; known: a,",
        ),
        ([["a"], ["b"]], [["a", "b"], [], ["b", "c"]], "row 3 of v has a label in label"),
    ],
)
def test_labels_of_validation_are_compared_with_those_of_training_as_texts(train, validation, expected):
    labels, table = Labels.from_table(table_of(train), "label"), table_of(validation, source="v")
    if isinstance(expected, str):
        assert expected in refusal(labels.encode, table)
    else:
        assert labels.encode(table).tolist() == expected


# Vectors of 0 and 1, several columns, texts with delimiters


@pytest.mark.parametrize(
    "type_", [pa.list_(pa.int64()), pa.list_(pa.float32()), pa.list_(pa.int8(), 3), pa.list_(pa.bool_())]
)
def test_vectors_of_zeros_and_ones_are_several_labels(type_):
    rows = [[0, 1, 1], [1, 0, 0], [0, 0, 0]]
    table = table_of([list(map(bool, row)) for row in rows] if type_ == pa.list_(pa.bool_()) else rows, type_)
    labels = Labels.from_table(table, "label")
    assert (labels.kind, labels.names) == ("multi_label", ("0", "1", "2"))
    assert labels.encode(table).dtype == np.float32
    assert labels.encode(table).tolist() == rows
    assert labels.ordered(("2", "0", "1")).encode(table).tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    for row in ([0, 1], [0, 1, 2], []):
        message = refusal(labels.encode, table_of([[0, 1, 1], row], pa.list_(pa.int64()), source="v"))
        assert message == f"row 2 of v has {row} in label: write 0 or 1 for each of the 3 labels"


def test_pairs_of_zeros_and_ones_are_vectors_and_ids_are_not():
    rows = [[0, 1], [1, 0], [1, 0]]
    assert Labels.from_table(table_of(rows), "label").encode(table_of(rows)).tolist() == rows
    for rows in ([[0], [1], [1]], [[0, 1], [1]], [[0, 1], [2, 1]], [["0", "1"], ["1", "2"]]):
        assert not Labels.from_table(table_of(rows), "label").vectors


@pytest.mark.parametrize("convert", [int, float, bool, lambda value: str(bool(value))])
def test_several_columns_are_labels_named_after_the_columns(convert):
    columns = {"sport": [0, 1, 1], "news": [1, 0, 1], "art": [0, 0, 0]}
    table = named(pa.table({name: list(map(convert, values)) for name, values in columns.items()}), "t")
    labels = Labels.from_table(table, ["sport", "news", "art"])
    assert str(labels) == "multi_label, 3 labels: sport, news, art"
    assert labels.encode(table).tolist() == [[0, 1, 0], [1, 0, 0], [1, 1, 0]]
    assert labels.ordered(("news", "art", "sport")).encode(table).tolist() == [[1, 0, 0], [0, 0, 1], [1, 0, 1]]


def test_a_text_with_delimiters_is_several_labels():
    table = table_of(["news,sport", "", "art , news", None, "sport"])
    labels = Labels.from_table(table, "label", None, ",")
    assert (labels.kind, labels.names) == ("multi_label", ("art", "news", "sport"))
    assert labels.encode(table).tolist() == [[0, 1, 1], [0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    numbers = Labels.from_table(table_of(["1;2", "3"]), "label", None, ";")
    assert numbers.encode(table_of([3, 1])).tolist() == [[0, 0, 1], [1, 0, 0]]  # a file without the delimiter


def ratings(*others):
    return [*(1 + i % 5 for i in range(300)), *others]


@pytest.mark.parametrize(
    ("numbers", "row"),
    [
        *((ratings(1e30), 301), (ratings(4e29, -1e30), 302), (ratings(1e30)[-9:], 9)),
        ([1e6 + n for n in ratings(1e6)], 301),
        *((others, None) for others in (ratings(), ratings(1e4), [1e30, 2e30, 5e30], [0.0] * 300 + [1e30])),
        *((others, None) for others in ([10.0**n for n in range(30)], [7.0], [1e9 + n for n in ratings()])),
    ],
)
def test_a_number_beside_which_float32_cannot_distinguish_the_others_is_refused_with_its_row(numbers, row):
    message = runs.problem_of(refuse_outliers, table_of(numbers), "label", np.array(numbers, float)) or ""
    assert message.startswith(f"row {row} of --train_file a.csv has {numbers[row - 1]:g} in label, wh" if row else "")
    assert bool(message) is bool(row)


def test_the_training_data_are_searched_for_such_a_number(tmp_path):
    rows = [f"text {number},{rating + 0.5}" for number, rating in enumerate(ratings())]
    (tmp_path / "a.csv").write_text("\n".join(["text,label", *rows, "odd,1e30"]))
    config = runs.load_recipe("nlp").Config(train_file=f"{tmp_path}/a.csv", validation_file=f"{tmp_path}/a.csv")
    assert refusal(load_labeled, config).startswith(f"row 301 of --train_file {tmp_path}/a.csv has 1e+30 in label")
