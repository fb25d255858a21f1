"""Cached gradients equal those of one pass over the whole batch, for any cut into micro-batches, with dropout."""

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contrastive import gradient_cache
from shared.contrastive.gradient_cache import GradientCache, measured, number_that_fits
from shared.contrastive.losses import RankingLoss
from shared.plan.batches import Plan
from shared.plan.draws import seed_dropout

WIDTH = 5
ACCELERATOR = SimpleNamespace(
    num_processes=1, no_sync=lambda model: nullcontext(), device=torch.device("cpu"), print=print
)


class Encoder(torch.nn.Module):
    """Two layers with dropout; counts its forward passes with a graph and without."""

    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Dropout(dropout))
        self.head = torch.nn.Linear(8, WIDTH)
        self.double()
        self.passes = {True: 0, False: 0}

    def forward(self, rows):
        self.passes[torch.is_grad_enabled()] += 1
        return self.head(self.layers(rows))


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def texts_of(kinds, samples):
    """The features of each text [kinds, samples, 4]; some samples have the same texts."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(kinds, samples, 4, dtype=torch.float64, generator=generator)


def batch_of(texts, samples):
    part = texts[:, torch.from_numpy(samples)]
    return {"rows": part.flatten(0, 1), "labels": (part[..., 0] * 1e6).long()}


@settings(max_examples=12)
@given(
    kinds=st.integers(2, 3),
    size=st.integers(2, 12),
    micro_batches=st.integers(1, 12),
    dropout=st.sampled_from([0.0, 0.5]),
    symmetric=st.booleans(),
    kept=st.none() | st.integers(1, 4),
)
def test_the_gradient_of_a_step_equals_that_of_one_pass_over_the_whole_batch(
    kinds, size, micro_batches, dropout, symmetric, kept
):
    cut = {"global_batch_size": size, "micro_batches_per_step": min(micro_batches, size)}
    plan = Plan(num_samples=40, seed=1, max_steps=3, **cut)
    texts, loss, model = texts_of(kinds, plan.num_samples), RankingLoss(0.1, symmetric), Encoder(dropout)

    def embed(micro_batch, batch):
        seed_dropout(torch.device("cpu"), 0, micro_batch.step, micro_batch.index)
        return model(batch["rows"])

    cache = GradientCache(ACCELERATOR, plan, loss, embed, kept)
    piece = next(iter(plan.micro_batches(0)))  # before the first step, it is a batch of its own
    batch = batch_of(texts, piece.samples)
    alone = loss.of_samples(embed(piece, batch).view(kinds, -1, WIDTH), batch["labels"]).sum() / size
    assert cache.loss(piece, batch).item() == pytest.approx(alone.item())
    for step in range(3):
        pieces = [(piece, batch_of(texts, piece.samples)) for piece in plan.micro_batches(step)]
        model.passes = {True: 0, False: 0}
        cache.fill(model, pieces)
        losses = [cache.loss(*each) for each in pieces]
        for share in losses:
            share.backward()
        assert model.passes == {True: len(pieces), False: max(0, len(pieces) - (kept or len(pieces)))}
        found = gradient_of(model)
        model.zero_grad()

        whole = torch.cat([embed(*each).view(kinds, -1, WIDTH) for each in pieces], dim=1)
        expected = loss.of_samples(whole, torch.cat([batch["labels"] for _, batch in pieces], dim=1)).mean()
        expected.backward()
        assert torch.allclose(found, gradient_of(model), rtol=1e-9, atol=1e-12)
        assert float(sum(losses).detach()) == pytest.approx(float(expected))
        model.zero_grad()


def test_a_repeated_micro_batch_has_neither_loss_nor_gradient():
    """Under FSDP, a process without a micro-batch of its own repeats one."""
    plan = Plan(num_samples=9, seed=1, global_batch_size=9, max_steps=1)
    texts, model = texts_of(2, 9), Encoder(0.0)
    (piece,) = plan.micro_batches(0)
    repeat = SimpleNamespace(index=1, counted=False, samples=piece.samples[-1:])
    pieces = [(piece, batch_of(texts, piece.samples)), (repeat, batch_of(texts, repeat.samples))]
    cache = GradientCache(ACCELERATOR, plan, RankingLoss(0.1), lambda _, batch: model(batch["rows"]), None)
    cache.fill(model, pieces)
    share, nothing = (cache.loss(*each) for each in pieces)
    nothing.backward()
    assert float(nothing) == 0
    assert not gradient_of(model).any()
    assert float(share) > 0


@pytest.mark.parametrize(("free", "processes", "expected"), [(0, 1, 1), (10_000, 1, 4), (20_000, 2, 4), (9_000, 9, 1)])
def test_as_many_micro_batches_keep_their_activations_as_fit_into_memory(monkeypatch, free, processes, expected):
    """Half of what the weights' gradients, moments and checkpoint leave is for activations."""
    monkeypatch.setattr(gradient_cache, "available_memory", lambda: free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    model = torch.nn.Linear(10, 8, bias=False)  # 320 bytes
    assert number_that_fits(ACCELERATOR, model, 1_000) == expected


def test_the_activations_of_a_graph_are_measured_once_each_and_freed():
    layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)).double()
    rows = torch.ones(100, 4, dtype=torch.float64)
    found, size = measured(torch.device("cpu"), lambda: layers(rows))
    weights = layers[2].weight.nbytes  # the backward pass of the second layer reads them
    assert size == rows.nbytes + 100 * 8 * 8 + weights
    output = weakref.ref(found)
    del found
    assert output() is None
