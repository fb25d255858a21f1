"""A batch of token rows: padded to the longest, with its targets as labels."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.text.tokenized import Padding


def make_items(rows: list[list[int]], types: bool, targets: np.ndarray | None):
    return [
        (
            np.array(row, np.uint16),
            np.array([value % 2 for value in row], np.uint8) if types else None,
            None if targets is None else targets[i],
        )
        for i, row in enumerate(rows)
    ]


@given(
    rows=st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=40), min_size=1, max_size=8),
    multiple_of=st.sampled_from([1, 8]),
    max_length=st.none() | st.integers(40, 50),
    types=st.booleans(),
)
def test_a_batch_is_its_rows_padded_to_the_longest(rows, multiple_of, max_length, types):
    batch = Padding(7, multiple_of, max_length)(make_items(rows, types, None))
    longest = max(map(len, rows))
    width = batch["input_ids"].shape[1]
    assert longest <= width < longest + multiple_of
    assert width % multiple_of == 0 or width == max_length
    assert batch["input_ids"].tolist() == [row + [7] * (width - len(row)) for row in rows]
    assert batch["attention_mask"].tolist() == [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    if types:
        expected = [[value % 2 for value in row] + [0] * (width - len(row)) for row in rows]
        assert batch["token_type_ids"].tolist() == expected
    assert set(batch) == {"input_ids", "attention_mask"} | ({"token_type_ids"} if types else set())
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    multiple_of=st.sampled_from([1, 8]),
    max_length=st.none() | st.integers(60, 70),
)
def test_padded_lengths_are_the_widths_of_batches_of_one_row(lengths, multiple_of, max_length):
    padding = Padding(0, multiple_of, max_length)
    alone = [padding(make_items([[1] * length], False, None))["input_ids"].shape[1] for length in lengths]
    assert padding.padded_lengths(np.array(lengths)).tolist() == alone


@pytest.mark.parametrize(
    ("targets", "dtype"),
    [
        (np.array([2, 0]), torch.int64),
        (np.array([0.5, -1.0], np.float32), torch.float32),
        (np.array([[1, 0, 1], [0, 0, 0]], np.float32), torch.float32),
    ],
)
def test_targets_become_labels_of_the_same_type_and_shape(targets, dtype):
    batch = Padding(0)(make_items([[1, 2], [3]], False, targets))
    assert batch["labels"].dtype == dtype
    assert batch["labels"].tolist() == targets.tolist()
