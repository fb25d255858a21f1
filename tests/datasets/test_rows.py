"""How columns of CSV files, which have no types, are interpreted."""

import pytest
from table_files import load, write

from shared.datasets.labels import Labels
from shared.errors import UserError


def labeled(tmp_path, train, validation=None, **flags):
    """Labels of a file with these texts as labels, and the targets of both parts."""
    for name, labels in (("train", train), ("validation", validation or train)):
        lines = ["text,label", *(f"row {i},{label}" for i, label in enumerate(labels))]
        flags[f"{name}_file"] = write(tmp_path / f"{name}.csv", "\n".join(lines) + "\n")
    tables = load(**flags)
    found = Labels.from_table(tables[0], "label", flags.get("problem_type"))
    return found, [found.encode(table).tolist() for table in tables]


@pytest.mark.parametrize(
    ("written", "names", "ids"),
    [
        (["1", "01", "1", "2"], ("01", "1", "2"), [1, 0, 1, 2]),
        (["10", "9", "0", " 9 "], ("0", "9", "10"), [2, 1, 0, 1]),
        (["+1", "1", "-1"], ("-1", "+1", "1"), [1, 2, 0]),
        (["NA", "DE", "null", "DE"], ("DE", "NA", "null"), [1, 0, 2, 0]),
        (["1.0", "1.5", "beta", "1.50"], ("1.0", "1.5", "1.50", "beta"), [0, 1, 3, 2]),
        (["12345678901234567890", "12345678901234567891"], ("12345678901234567890", "12345678901234567891"), [0, 1]),
    ],
)
def test_labels_of_a_csv_file_are_classes_spelled_as_in_the_file(tmp_path, written, names, ids):
    labels, targets = labeled(tmp_path, written)
    assert (labels.kind, labels.names) == ("classification", names)
    assert targets == [ids, ids]


@pytest.mark.parametrize(
    ("train", "validation", "problem_type", "targets"),
    [
        (["0.5", "1", "NA", "NA"], None, None, r"row 3 of .* has no label in label"),
        (["0.5", "1e1", "-.25"], ["1", "007"], None, [[0.5, 10, -0.25], [1, 7]]),
        (["1", "02", "3"], ["4", "5"], "regression", [[1, 2, 3], [4, 5]]),
        (["0.5", "1.5"], ["0.5", "one"], None, r"row 2 of --validation_file .* has 'one' in label: regression needs"),
        (["1", "2", "x"], None, "regression", r"row 3 of --train_file .* has 'x' in label: regression needs a number"),
    ],
)
def test_numbers_of_a_csv_file_are_regression_targets_if_one_is_not_an_integer_or_on_request(
    tmp_path, train, validation, problem_type, targets
):
    if isinstance(targets, str):
        with pytest.raises(UserError, match=targets):
            labeled(tmp_path, train, validation, problem_type=problem_type)
        return
    labels, found = labeled(tmp_path, train, validation, problem_type=problem_type)
    assert (labels.kind, found) == ("regression", targets)


@pytest.mark.parametrize("text", [("text", "label"), ("text", "text")])
def test_text_and_label_columns_that_overlap_are_refused(tmp_path, text):
    path = write(tmp_path / "a.csv", "text,label\na,1\nb,2\n")
    expected = f"--label_column_name label and the column {' '.join(text)}: use different"
    with pytest.raises(UserError, match=expected):
        load(text, "label", train_file=path)
