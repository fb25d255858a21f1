"""How torch computes: cuDNN's attention is off unless it is named, and exact arithmetic does not use TF32."""

import numpy as np
import pytest
import torch
from families import batch, small

from shared.augmentation import operations
from shared.config.options import Options
from shared.contrastive import retrieval
from shared.contrastive.losses import RankingLoss, with_gradient
from shared.encoders.text_models import compute_exact_angles
from shared.processes import starting


@pytest.fixture(autouse=True)
def restored():
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, torch.backends.cuda.cudnn_sdp_enabled()
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before[:2]
    torch.backends.cuda.enable_cudnn_sdp(before[2])


def test_a_run_does_not_depend_on_an_earlier_one_of_the_process(monkeypatch, launched_by_nobody):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    for deterministic in (False, True, False):
        torch.backends.cuda.enable_cudnn_sdp(True)
        starting.start(Options(deterministic=deterministic))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
        assert torch.are_deterministic_algorithms_enabled() == deterministic != torch.backends.cuda.matmul.allow_tf32


def noting(seen, function):
    """`function`, which also notes in `seen` whether it runs with TF32."""

    def wrapped(*args, **more):
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return function(*args, **more)

    return wrapped


def resample(monkeypatch, seen):
    monkeypatch.setitem(operations.FILTERS, "bilinear", noting(seen, operations.FILTERS["bilinear"]))
    monkeypatch.setattr(operations.F, "affine_grid", noting(seen, operations.F.affine_grid))
    operations.affine(torch.zeros(1, 3, 2, 2), np.eye(2, 3)[None])
    operations.crop_and_resize(torch.zeros(1, 4, 4, 3, dtype=torch.uint8), torch.tensor([[0.0, 0.0, 1.0, 1.0]]), 2)


def rotate(monkeypatch, seen):
    model = small("modernbert")
    monkeypatch.setattr(model.model.rotary_emb, "forward", noting(seen, model.model.rotary_emb.forward))
    compute_exact_angles(model)
    model(**batch())


def rank(monkeypatch, seen):
    monkeypatch.setattr(retrieval, "figures", noting(seen, retrieval.figures))
    monkeypatch.setattr(torch.Tensor, "cumsum", None)  # of fractions: a GPU refuses it with --deterministic
    retrieval.evaluate(None, torch.eye(3), torch.eye(3), retrieval.retrieval_task(np.arange(3), np.arange(3)), 0.05)


def compute_the_loss(monkeypatch, seen):
    monkeypatch.setattr(RankingLoss, "_cross_entropy", noting(seen, RankingLoss._cross_entropy))
    with_gradient(RankingLoss(0.05), torch.eye(3).expand(2, 3, 3), torch.arange(6).view(2, 3))


@pytest.mark.parametrize("compute", [resample, rotate, rank, compute_the_loss])
def test_exact_arithmetic_does_not_use_tf32(monkeypatch, compute):
    seen = []
    torch.backends.cuda.matmul.allow_tf32 = True
    compute(monkeypatch, seen)
    assert seen
    assert not any(seen)
    assert torch.backends.cuda.matmul.allow_tf32, "the setting of the run is restored"
