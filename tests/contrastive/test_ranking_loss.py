"""The ranking loss against a second implementation, sample by sample, and its gradient in parts."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contrastive import losses
from shared.contrastive.losses import RankingLoss, with_gradient


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
