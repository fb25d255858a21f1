"""A batch of token rows: padded to the longest, with its targets as labels."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.text.tokenized import Padding


@given(
    rows=st.lists(st.lists(st.integers(0, 65_535), min_size=1, max_size=40), min_size=1, max_size=8),
    multiple_of=st.sampled_from([1, 8]),
    max_length=st.none() | st.integers(40, 50),
    types=st.booleans(),
    targets=st.sampled_from([None, np.arange(8), np.arange(8, dtype=np.float32) / 2, np.eye(8, 3, dtype=np.float32)]),
)
def test_a_batch_is_its_rows_padded_to_the_longest_with_its_targets_as_labels(
    rows, multiple_of, max_length, types, targets
):
    kinds = [[value % 2 for value in row] for row in rows]
    items = [
        (np.array(row, np.uint16), np.array(kind, np.uint8) if types else None, None if targets is None else targets[i])
        for i, (row, kind) in enumerate(zip(rows, kinds, strict=True))
    ]
    padding = Padding(7, multiple_of, max_length)
    batch, longest = padding(items), max(map(len, rows))
    width = batch["input_ids"].shape[1]
    assert longest <= width < longest + multiple_of
    assert width % multiple_of == 0 or width == max_length
    assert width == padding.padded_lengths(np.array([*map(len, rows)])).max()
    expected = {"input_ids": [row + [7] * (width - len(row)) for row in rows]}
    expected["attention_mask"] = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    if types:
        expected["token_type_ids"] = [kind + [0] * (width - len(kind)) for kind in kinds]
    assert {tensor.dtype for tensor in batch.values()} - {torch.float32} == {torch.int64}
    if targets is not None:
        expected["labels"] = targets[: len(rows)].tolist()
        assert batch["labels"].numpy().dtype == targets.dtype
    assert {name: tensor.tolist() for name, tensor in batch.items()} == expected
