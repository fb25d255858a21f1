"""The validation split holds out a share of each label, chosen by the seed."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st
from runs import refusal

from shared.datasets.rows import named, where
from shared.datasets.tables import hold_out, share_of_each


@given(rows=st.integers(2, 300), percentage=st.integers(1, 99), seed=st.integers(-5, 2**64))
def test_the_split_has_every_row_once_in_order_with_its_row_number(rows, percentage, seed):
    table = named(pa.table({"x": np.arange(rows)}), "--train_file \udcff.csv")
    train, validation = hold_out(table, percentage, seed)
    assert sorted(train["x"].to_pylist() + validation["x"].to_pylist()) == list(range(rows))
    for part in (train, validation):
        numbers = part["x"].to_pylist()
        assert numbers == sorted(numbers)
        assert where(part, len(numbers) - 1) == f"row {numbers[-1] + 1} of --train_file ?.csv"  # the byte is no UTF-8
    assert abs(validation.num_rows - rows * percentage / 100) <= 1


@given(st.lists(st.integers(0, 5), min_size=2, max_size=200), st.integers(1, 99), st.integers(0, 99))
def test_each_label_is_split_and_keeps_a_row_to_train_on(labels, percentage, seed):
    table, targets = pa.table({"x": labels}), np.array(labels)
    if len(set(labels)) == len(labels):
        refused = refusal(hold_out, table, percentage, seed, targets)
        assert "has one row of each label, so none can be held out" in refused
        return
    train, validation = hold_out(table, percentage, seed, targets)
    assert set(train["x"].to_pylist()) == set(labels)
    assert validation.num_rows > 0
    held_out, counts = (np.bincount(part, minlength=6) for part in (validation["x"].to_numpy(), targets))
    assert (np.abs(held_out - counts * percentage / 100) <= 1).all()
    assert hold_out(table, percentage, seed, targets)[1]["x"].to_pylist() == validation["x"].to_pylist()


@given(st.lists(st.sets(st.integers(0, 4)), min_size=2, max_size=60), st.integers(1, 99), st.integers(0, 9))
def test_with_several_labels_per_row_each_label_keeps_a_row_to_train_on(rows, percentage, seed):
    targets = np.array([[label in row for label in range(5)] for row in rows], np.float32)
    held_out = share_of_each(targets, percentage, seed)
    assert (targets[~held_out].any(0) == targets.any(0)).all()
    assert held_out.sum() <= len(rows) * percentage / 100
    assert np.array_equal(share_of_each(targets, percentage, seed), held_out)


def test_rows_with_regression_targets_are_split_like_rows_without_labels_by_the_seed():
    table = pa.table({"x": np.arange(20)})
    assert hold_out(table, 25, 0, np.arange(20.0))[1] == hold_out(table, 25, 0)[1]
    assert hold_out(table, 25, 0)[1]["x"].to_pylist() == [4, 8, 13, 14, 17]  # a resumed run relies on it
    assert hold_out(table, 25, 1)[1]["x"].to_pylist() != [4, 8, 13, 14, 17]
    assert "one row" in refusal(hold_out, table.slice(1, 1), 10, 0)
