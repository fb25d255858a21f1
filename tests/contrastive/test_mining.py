"""Mined negatives against a second implementation, sample by sample."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from shared import mine_negatives


@settings(max_examples=40)
@given(
    size=st.integers(1, 25),
    texts=st.integers(1, 12),
    count=st.integers(1, 5),
    share=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    at_once=st.integers(1, 100),
    seed=st.integers(0, 1000),
)
def test_negatives_are_the_nearest_texts_within_the_limit_that_are_no_positive_of_the_anchor(
    size, texts, count, share, at_once, seed
):
    random = np.random.default_rng(seed)
    names = random.integers(0, texts, (2, size)) * 7
    generator = torch.Generator().manual_seed(seed)
    every = F.normalize(torch.randn(2, texts, 4, generator=generator, dtype=torch.float64), dim=2)
    anchors, positives = (every[side, torch.from_numpy(names[side] // 7)] for side in (0, 1))  # equal texts are equal
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mine_negatives, "SCORES_AT_ONCE", at_once)
        numbers, enough = mine_negatives.hardest_negatives(anchors, positives, (names[0], names[1]), count, share)
    for i in range(size):
        fits = {names[1][j] for j in range(size) if names[0][j] == names[0][i]}
        own = float(anchors[i] @ positives[i])
        scores = {names[1][j]: float(anchors[i] @ positives[j]) for j in range(size) if names[1][j] not in fits}
        within = {text: score for text, score in scores.items() if score <= own - (1 - share) * abs(own)}
        expected = sorted(within, key=within.__getitem__, reverse=True)[:count]
        assert enough[i] == (len(expected) == count)
        if enough[i]:
            assert [names[1][j] for j in numbers[i]] == expected
