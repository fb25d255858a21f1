"""Labels of the training and the validation part are matched by their names."""

import pytest
from runs import refusal
from table_files import class_labels, table_of

from shared.datasets.labels import Labels

NAMES = ["bad", "so-so", "good"]
TRAINING = {
    "ClassLabel": lambda: class_labels(table_of([2, 0]), NAMES),  # one class without a row
    "texts": lambda: table_of(["good", "bad", "so-so"]),
}


@pytest.mark.parametrize("training", list(TRAINING))
@pytest.mark.parametrize(
    "validation",
    [
        lambda: class_labels(table_of([0, 1, 2], source="v"), NAMES),
        lambda: class_labels(table_of([2, 0, 1], source="v"), ["so-so", "good", "bad"]),
        lambda: class_labels(table_of([1, 2, 3], source="v"), ["unused", "bad", "so-so", "good"]),
        lambda: table_of(["bad", "so-so", "good"], source="v"),
    ],
    ids=["same ClassLabel", "another order", "more names", "texts"],
)
def test_labels_are_matched_by_their_names(training, validation):
    labels = Labels.from_table(TRAINING[training](), "label")
    encoded = labels.encode(validation())
    assert [labels.names[i] for i in encoded] == ["bad", "so-so", "good"]


@pytest.mark.parametrize("as_list", [{"_type": "List"}, {"length": -1, "_type": "Sequence"}])
def test_lists_of_labels_are_matched_by_their_names(as_list):
    labels = Labels.from_table(class_labels(table_of([[1], [0, 2]]), NAMES, as_list), "label")
    validation = class_labels(table_of([[0], [2, 1]], source="v"), ["good", "so-so", "bad"], as_list)
    assert labels.encode(validation).tolist() == [[0, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("training", list(TRAINING))
def test_a_name_that_the_training_data_lacks_is_refused_for_any_number(training):
    labels = Labels.from_table(TRAINING[training](), "label")
    message = refusal(labels.encode, class_labels(table_of([0, 1], source="v"), ["bad", "ugly"]))
    assert message.startswith("row 2 of v has a label in label that training does not have (unknown: ugly; known: ")


def test_numbers_without_names_are_matched_to_the_names_of_the_other_part_with_a_message(capsys):
    said = "has names of labels: matched by number (0 is bad, 1 is so-so, 2 is good)\n"
    labels = Labels.from_table(TRAINING["ClassLabel"](), "label")
    assert labels.encode(table_of([2, 0], source="v")).tolist() == [2, 0]
    assert capsys.readouterr().err == f"v: only the training data {said}"
    for others in ([2, -1], [2, 3]):
        assert refusal(labels.encode, table_of(others, source="v")).startswith("row 1 of v has a label in label that")
    labels = Labels.from_table(table_of([0, 1, 2]), "label")
    assert labels.encode(class_labels(table_of([2, 0], source="v"), NAMES)).tolist() == [2, 0]
    assert capsys.readouterr().err == f"v: only v {said}"


def test_numbers_that_may_be_names_are_refused_only_where_both_readings_fit_and_numbers_without_names_always():
    labels = Labels.from_table(class_labels(table_of([0, 1, 2]), ["1", "2", "3"]), "label")
    assert labels.encode(table_of([1, 3], source="v")).tolist() == [0, 2]
    assert "can be names or numbers of classes" in refusal(labels.encode, table_of([1, 2], source="v"))
    assert labels.encode(class_labels(table_of([1, 0], source="v"), ["3", "1"])).tolist() == [0, 2]
    table = class_labels(table_of([0, 1, 2]), ["no", "yes"])
    message = refusal(Labels.from_table(table, "label").encode, table)
    assert message.startswith("row 3 of --train_file a.csv has 2 in label, but its ClassLabel has names for 0 to 1 on")
