"""The CoSENT loss against its formula, and its gradient."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from shared.contrastive.losses import CosentLoss, cosines_of, of_cosines, with_gradient


def by_formula(embeddings, scores, temperature):
    """The loss by its definition, from all differences of two cosines."""
    scaled = torch.nn.functional.cosine_similarity(*embeddings, dim=-1) / temperature
    differences = scaled[:, None] - scaled[None, :]
    counted = differences[scores[:, None] < scores[None, :]]
    return torch.cat([torch.zeros(1, dtype=scaled.dtype), counted]).logsumexp(0)


@st.composite
def batches(draw):
    """Embeddings [2, samples, 6], and scores with many ties."""
    scores = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 3.0]), min_size=1, max_size=9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    embeddings = torch.randn(2, len(scores), 6, dtype=torch.float64, generator=generator)
    return embeddings, torch.tensor(scores, dtype=torch.float64)


@settings(max_examples=40)
@given(batches(), st.sampled_from([(), (6,), (6, 3, 2)]), st.sampled_from([0.05, 0.5]))
def test_loss_and_gradient_are_those_of_the_formula(batch, dims, temperature):
    embeddings, scores = batch
    losses, gradient = with_gradient(CosentLoss(temperature, dims), embeddings, scores[None])
    leaf = embeddings.clone().requires_grad_()
    want = torch.stack([by_formula(leaf[..., :dim], scores, temperature) for dim in dims or (6,)]).mean()
    (want + 0 * leaf.sum()).backward()
    assert losses.tolist() == pytest.approx([float(want.detach())] * len(scores), rel=1e-9)
    assert torch.allclose(gradient, leaf.grad, rtol=1e-9, atol=1e-12)
    assert not embeddings.requires_grad


@pytest.mark.docs  # importing the library takes seconds
def test_it_is_the_loss_of_sentence_transformers():
    from sentence_transformers.sentence_transformer.losses import CoSENTLoss

    generator = torch.Generator().manual_seed(0)
    embeddings, scores = torch.randn(2, 32, 16, generator=generator), torch.arange(32.0) % 5
    want = CoSENTLoss(torch.nn.Identity(), scale=20).compute_loss_from_embeddings([*embeddings], scores)
    loss = CosentLoss(0.05).of_samples(embeddings, scores.double()[None])
    assert float(loss[0]) == pytest.approx(float(want), rel=1e-6)


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
