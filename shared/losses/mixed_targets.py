"""The training loss of images that may be mixed from two images, computed from class numbers."""

from torch import Tensor
from torch.nn import functional as F

from shared.augmentation.augmentation import Targets


def mixed_cross_entropy(
    logits: Tensor,
    targets: Targets,
    label_smoothing: float = 0.0,
    weight: Tensor | None = None,
    binary: bool = False,
) -> Tensor:
    """Cross entropy of each row with its target, [rows], without a tensor of the targets' probabilities.

    Cross entropy is linear in the target. So the loss of a mixture is the same mixture of the losses of its classes,
    and label smoothing mixes in the mean loss over all classes.

    Args:
        logits: [rows, classes].
        targets: of the rows.
        label_smoothing: share of each target that is spread evenly over all classes.
        weight: [classes], of the logarithm of each class's probability; None: 1 each.
        binary: the sum of the binary cross entropies of all classes, with the same probabilities as targets
            (Wightman et al. 2021, "ResNet strikes back"). It takes no `weight`.
    """
    if binary:
        return F.softplus(logits).sum(-1) - expected_logit(logits, targets, label_smoothing)
    if targets.others is None or targets.share is None:
        return F.cross_entropy(logits, targets.labels, weight, reduction="none", label_smoothing=label_smoothing)
    log_probabilities = F.log_softmax(logits, dim=-1)
    own, other = (F.nll_loss(log_probabilities, c, weight, reduction="none") for c in (targets.labels, targets.others))
    losses = other + targets.share * (own - other)
    if not label_smoothing:
        return losses
    weighted = log_probabilities if weight is None else log_probabilities * weight
    return losses - label_smoothing * (losses + weighted.mean(-1))


def expected_logit(logits: Tensor, targets: Targets, label_smoothing: float) -> Tensor:
    """The mean of each row's logits by the probabilities of its target, [rows]."""
    found = logits.gather(1, targets.labels[:, None])[:, 0]
    if targets.others is not None and targets.share is not None:
        other = logits.gather(1, targets.others[:, None])[:, 0]
        found = other + targets.share * (found - other)
    return found + label_smoothing * (logits.mean(-1) - found)
