"""The loss from class numbers equals torch's loss from the probabilities of all classes."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.harness.image_variants import probabilities
from shared.augmentation.augmentation import Targets, mixed_cross_entropy

ROWS, CLASSES = 12, 7


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", ["plain", "weighted", "binary"])
def test_loss_and_gradient_equal_those_of_probabilities(smoothing, mixed, kind):
    """Without mixing and smoothing, those of exclusive classes are equal to the bit."""
    torch.manual_seed(0)
    labels, share = torch.randint(CLASSES, (ROWS,)), torch.rand(ROWS)
    share[:2] = torch.tensor([0.0, 1.0])
    targets = Targets(labels, labels.roll(1), share) if mixed else Targets(labels)
    weight = torch.linspace(0.2, 3, CLASSES) if kind == "weighted" else None
    logits = (5 * torch.randn(ROWS, CLASSES)).requires_grad_()
    expected = logits.detach().clone().requires_grad_()
    losses = mixed_cross_entropy(logits, targets, smoothing, weight, binary=kind == "binary")
    given = probabilities(targets, CLASSES)
    if kind == "binary":
        smooth = (1 - smoothing) * given + smoothing / CLASSES
        wanted = F.binary_cross_entropy_with_logits(expected, smooth, reduction="none").sum(-1)
    else:
        wanted = F.cross_entropy(expected, given, weight, reduction="none", label_smoothing=smoothing)
    assert losses.shape == (ROWS,)
    for each in (losses, wanted):
        each.sum().div(ROWS).backward()
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad, expected.grad, rtol=1e-5, atol=1e-6)
    if kind == "plain" and not mixed and not smoothing:
        assert torch.equal(losses, wanted)
        assert torch.equal(logits.grad, expected.grad)
