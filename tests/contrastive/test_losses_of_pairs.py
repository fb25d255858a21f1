"""The losses of pairs against their definitions, and their gradients, which the ranking loss computes in parts."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shared.contrastive import losses
from shared.contrastive.losses import CosentLoss, RankingLoss, cosines_of, of_cosines, with_gradient


def cosine(one, other):
    return float(one @ other / (one.norm() * other.norm()))


def cross_entropy(own, others, temperature):
    return math.log(sum(math.exp(score / temperature) for score in (own, *others))) - own / temperature


def expected(embeddings, texts, temperature, symmetric=False, dims=(), margin=math.inf):
    """The loss of each sample by its definition; `texts` has the names of the texts [kinds][samples]."""
    means = []
    for dim in dims or (embeddings.shape[2],):
        anchors, positives, *negatives = embeddings[..., :dim]
        losses = []
        for i in range(len(anchors)):
            unknown = [j for j in range(len(anchors)) if texts[0][j] != texts[0][i] and texts[1][j] != texts[1][i]]
            others = [cosine(anchors[i], positives[j]) for j in unknown]
            for kind in range(len(negatives)):
                named = enumerate(texts[2 + kind])
                others += [cosine(anchors[i], negatives[kind][j]) for j, text in named if text != texts[1][i]]
            own = cosine(anchors[i], positives[i])
            loss = cross_entropy(own, [other for other in others if other <= own + margin], temperature)
            if symmetric:
                others = [cosine(positives[i], anchors[j]) for j in unknown]
                back = cross_entropy(own, [other for other in others if other <= own + margin], temperature)
                loss = (loss + back) / 2
            losses.append(loss)
        means.append(torch.tensor(losses, dtype=torch.float64))
    return torch.stack(means).mean(0)


@st.composite
def batches(draw):
    """Embeddings [kinds, samples, 6] in float64, and names of their texts with many duplicates."""
    kinds, samples = draw(st.integers(2, 4)), draw(st.integers(1, 7))
    texts = draw(
        st.lists(st.lists(st.integers(0, 5), min_size=samples, max_size=samples), min_size=kinds, max_size=kinds)
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return torch.randn(kinds, samples, 6, dtype=torch.float64, generator=generator), torch.tensor(texts)


@settings(max_examples=25)
@given(batches(), st.booleans(), st.sampled_from([(), (6,), (6, 3, 2)]), st.sampled_from([None, -0.5, 0.0, 0.3]))
def test_the_loss_of_each_sample_is_its_definition(batch, symmetric, dims, margin):
    embeddings, texts = batch
    found = RankingLoss(0.2, symmetric, dims, margin).of_samples(embeddings, texts)
    most = math.inf if margin is None else margin
    want = expected(embeddings, texts.tolist(), 0.2, symmetric, dims, most)
    assert torch.allclose(found, want, rtol=1e-9, atol=1e-12)


@settings(max_examples=20)
@given(batches(), st.booleans(), st.integers(1, 60), st.sampled_from([None, 0.1]))
def test_the_gradient_in_parts_is_that_of_the_mean_of_all_losses(batch, symmetric, at_once, margin):
    embeddings, texts = batch
    loss = RankingLoss(0.2, symmetric, (6, 3), margin)
    whole = embeddings.clone().requires_grad_()
    loss.of_samples(whole, texts).mean().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "SCORES_AT_ONCE", at_once)
        found, gradient = with_gradient(loss, embeddings, texts)
    assert torch.allclose(gradient, whole.grad, rtol=1e-9, atol=1e-12)
    assert torch.allclose(found, loss.of_samples(embeddings, texts), rtol=1e-12)
    assert not embeddings.requires_grad


def by_formula(embeddings, scores, temperature):
    """The loss by its definition, from all differences of two cosines."""
    scaled = torch.nn.functional.cosine_similarity(*embeddings, dim=-1) / temperature
    differences = scaled[:, None] - scaled[None, :]
    counted = differences[scores[:, None] < scores[None, :]]
    return torch.cat([torch.zeros(1, dtype=scaled.dtype), counted]).logsumexp(0)


@st.composite
def scored_pairs(draw):
    """Embeddings [2, samples, 6], and scores with many ties."""
    scores = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 3.0]), min_size=1, max_size=9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    embeddings = torch.randn(2, len(scores), 6, dtype=torch.float64, generator=generator)
    return embeddings, torch.tensor(scores, dtype=torch.float64)


@settings(max_examples=40)
@given(scored_pairs(), st.sampled_from([(), (6,), (6, 3, 2)]), st.sampled_from([0.05, 0.5]))
def test_loss_and_gradient_are_those_of_the_formula(batch, dims, temperature):
    embeddings, scores = batch
    losses, gradient = with_gradient(CosentLoss(temperature, dims), embeddings, scores[None])
    leaf = embeddings.clone().requires_grad_()
    want = torch.stack([by_formula(leaf[..., :dim], scores, temperature) for dim in dims or (6,)]).mean()
    (want + 0 * leaf.sum()).backward()
    assert losses.tolist() == pytest.approx([float(want.detach())] * len(scores), rel=1e-9)
    assert torch.allclose(gradient, leaf.grad, rtol=1e-9, atol=1e-12)
    assert not embeddings.requires_grad


def test_cosines_that_differ_much_do_not_overflow():
    cosines, scores = torch.tensor([1.0, -1.0, 0.0]), torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    assert float(of_cosines(cosines, scores, 1e-3)) == pytest.approx(2000, rel=1e-9)  # 1 - (-1) by 0.001
    assert float(of_cosines(cosines, -scores, 1e-3)) == pytest.approx(1000, rel=1e-9)


def test_scores_of_an_evaluation_are_correlations_of_all_pairs():
    generator = torch.Generator().manual_seed(1)
    embeddings, scores = torch.randn(2, 40, 8, generator=generator), torch.arange(40.0).numpy() % 7
    similarity = CosentLoss(0.1, (4,))
    found = similarity.evaluate(None, [*embeddings], SimpleNamespace(scores=scores))
    cosines, of_four = (cosines_of(embeddings, dim).numpy() for dim in (8, 4))
    assert found == pytest.approx(
        {
            "eval_loss": float(by_formula(embeddings, torch.from_numpy(scores), 0.1)),
            "eval_spearman": stats.spearmanr(cosines, scores).statistic,
            "eval_pearson": stats.pearsonr(cosines, scores).statistic,
            "eval_spearman_dim_4": stats.spearmanr(of_four, scores).statistic,
        },
        rel=1e-5,
    )
    assert tuple(found) == ("eval_loss", *(f"eval_{name}" for name in similarity.names))
