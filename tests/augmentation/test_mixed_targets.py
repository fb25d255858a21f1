"""The loss from class numbers equals torch's loss from the probabilities of all classes."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.harness.image_variants import probabilities
from shared.augmentation.augmentation import Targets, mixed_cross_entropy

ROWS, CLASSES = 12, 7


def losses_and_gradients(smoothing, mixed, weight=None):
    torch.manual_seed(0)
    labels, share = torch.randint(CLASSES, (ROWS,)), torch.rand(ROWS)
    share[:2] = torch.tensor([0.0, 1.0])
    targets = Targets(labels, labels.roll(1), share) if mixed else Targets(labels)
    found = []
    for compute in (
        lambda logits: mixed_cross_entropy(logits, targets, smoothing, weight),
        lambda logits: F.cross_entropy(
            logits, probabilities(targets, CLASSES), weight, reduction="none", label_smoothing=smoothing
        ),
    ):
        logits = (5 * torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(1))).requires_grad_()
        losses = compute(logits)
        losses.sum().div(ROWS).backward()
        found.append((losses.detach(), logits.grad))
    return found


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("weight", [None, torch.linspace(0.2, 3, CLASSES)], ids=["plain", "weighted"])
def test_loss_and_gradient_equal_those_of_probabilities(smoothing, mixed, weight):
    (losses, gradient), (expected, expected_gradient) = losses_and_gradients(smoothing, mixed, weight)
    assert losses.shape == (ROWS,)
    assert torch.allclose(losses, expected, rtol=1e-6, atol=1e-6)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
def test_binary_loss_and_gradient_equal_torchs_of_probabilities(smoothing, mixed):
    torch.manual_seed(0)
    labels, share = torch.randint(CLASSES, (ROWS,)), torch.rand(ROWS)
    targets = Targets(labels, labels.roll(1), share) if mixed else Targets(labels)
    logits = (5 * torch.randn(ROWS, CLASSES)).requires_grad_()
    smooth = (1 - smoothing) * probabilities(targets, CLASSES) + smoothing / CLASSES
    found = mixed_cross_entropy(logits, targets, smoothing, binary=True)
    expected = F.binary_cross_entropy_with_logits(logits, smooth, reduction="none").sum(-1)
    assert torch.allclose(found, expected, rtol=1e-5)
    gradients = [torch.autograd.grad(losses.sum(), logits)[0] for losses in (found, expected)]
    assert torch.allclose(*gradients, rtol=1e-5, atol=1e-6)


def test_without_mixing_and_smoothing_they_are_equal_to_the_bit():
    (losses, gradient), (expected, expected_gradient) = losses_and_gradients(0.0, False)
    assert torch.equal(losses, expected)
    assert torch.equal(gradient, expected_gradient)


def test_probabilities_are_the_shares_of_both_classes():
    targets = Targets(torch.tensor([0, 2]), torch.tensor([1, 2]), torch.tensor([0.75, 0.25]))
    assert probabilities(targets, 3).tolist() == [[0.75, 0.25, 0.0], [0.0, 0.0, 1.0]]
