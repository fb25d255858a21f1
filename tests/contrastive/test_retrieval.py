"""Retrieval scores against a second implementation, query by query; so are mined negatives."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from shared import mine_negatives
from shared.contrastive import retrieval
from shared.contrastive.losses import RankingLoss


def normalized(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def expected(anchors, positives, anchor_names, positive_names, temperature):
    """The loss and scores by their definitions: equal texts are one query or one document.

    The positives and their names may be followed by those of a corpus.
    """
    queries, documents = (
        dict(zip(reversed(names), reversed(normalized(rows)), strict=True))
        for names, rows in ((anchor_names, anchors), (positive_names, positives))
    )
    positive_names = positive_names[: len(anchor_names)]
    losses, scores = [], []
    for query, vector in queries.items():
        found = {name: float(row @ vector) for name, row in documents.items()}
        fits = {p for a, p in zip(anchor_names, positive_names, strict=True) if a == query}
        others = [math.exp(score / temperature) for name, score in found.items() if name not in fits]
        losses += [math.log(math.exp(found[p] / temperature) + sum(others)) - found[p] / temperature for p in fits]
        hits = [name in fits for name in sorted(found, key=found.get, reverse=True)[:10]]
        gain = sum(1 / math.log2(2 + place) for place, hit in enumerate(hits) if hit)
        ideal = sum(1 / math.log2(2 + place) for place in range(min(10, len(fits))))
        first = 1 / (1 + hits.index(True)) if any(hits) else 0
        scores.append((gain / ideal, sum(hits) / len(fits), first))
    return dict(zip(("loss", *retrieval.NAMES), (np.mean(losses), *np.mean(scores, axis=0)), strict=True))


@st.composite
def tasks(draw):
    """Embeddings of anchors, positives and a corpus, and the names of their texts, which repeat."""
    size = draw(st.integers(1, 30))
    names = [draw(st.lists(st.integers(0, 20), min_size=size, max_size=size)) for _ in range(2)]
    names.append(draw(st.lists(st.integers(0, 20), max_size=40)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    vectors = [torch.randn(21, 4, generator=generator)[each] for each in names]  # equal texts, equal embeddings
    return vectors, names


@settings(max_examples=25)
@given(tasks(), st.integers(1, 200))
def test_the_scores_are_their_definitions(task, at_once):
    (anchors, *documents), names = task
    described = retrieval.retrieval_task(*(np.array(each, np.int64) for each in names))
    positives, names = torch.cat(documents), (names[0], names[1] + names[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retrieval, "SCORES_AT_ONCE", at_once)
        found = retrieval.evaluate(None, anchors, positives, described, 0.5, (2,))
    want = expected(anchors.double().numpy(), positives.double().numpy(), *names, 0.5)
    want["ndcg_at_10_dim_2"] = expected(anchors[:, :2].numpy(), positives[:, :2].numpy(), *names, 0.5)["ndcg_at_10"]
    named = dict(zip(("loss", *RankingLoss(0.5, dims=(2,)).names), found, strict=True))
    assert named == pytest.approx(want, rel=1e-5, abs=1e-6)


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
