"""The loss of a mixture of two classes is the same mixture of their losses."""

import pytest
import torch
from torch.nn import functional as F

from shared.augmentation.augmentation import mixed_cross_entropy

ROWS, CLASSES = 12, 7


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", ["plain", "weighted", "binary"])
def test_loss_and_gradient_are_the_mixture_of_those_of_the_two_classes(smoothing, mixed, kind):
    """Without mixing, those of exclusive classes are equal to the bit."""
    torch.manual_seed(0)
    labels, share = torch.randint(CLASSES, (ROWS,)), torch.rand(ROWS)
    share[:2] = torch.tensor([0.0, 1.0])
    weight = torch.linspace(0.2, 3, CLASSES) if kind == "weighted" else None
    logits = (5 * torch.randn(ROWS, CLASSES)).requires_grad_()
    expected = logits.detach().clone().requires_grad_()

    def loss_of(classes):
        if kind != "binary":
            return F.cross_entropy(expected, classes, weight, reduction="none", label_smoothing=smoothing)
        target = (1 - smoothing) * expected[range(ROWS), classes] + smoothing * expected.mean(-1)
        return F.softplus(expected).sum(-1) - target

    losses = mixed_cross_entropy(logits, labels, share if mixed else None, smoothing, weight, binary=kind == "binary")
    wanted = share * loss_of(labels) + (1 - share) * loss_of(labels.roll(1)) if mixed else loss_of(labels)
    for each in (losses, wanted):
        each.sum().div(ROWS).backward()
    torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad, expected.grad, rtol=1e-5, atol=1e-6)
    if kind != "binary" and not mixed:
        assert torch.equal(losses, wanted)
        assert torch.equal(logits.grad, expected.grad)
