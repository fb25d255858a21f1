"""The CoSENT loss: the cosines of pairs of texts should have the order of the scores of these pairs.

Su, 2022 (https://kexue.fm/archives/8847). The loss of a batch of G pairs with the cosines c and the scores s is

    log(1 + sum over all i, j with s_i < s_j of exp((c_i - c_j) / temperature))

Only the order of the scores matters, so they may have any scale.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class CosentLoss:
    """The loss of a batch of embeddings.

    Attributes:
        temperature: divides the cosines.
        dims: the mean of the losses of the first d dimensions of the embeddings, for each d; see `RankingLoss`.
    """

    temperature: float
    dims: tuple[int, ...] = ()

    def of_samples(self, embeddings: Tensor, scores: Tensor) -> Tensor:
        """The loss of a batch, for each of its samples, [G]: it belongs to the batch as a whole.

        Args:
            embeddings: [2, G, width]: the first and the second texts. Not normalized.
            scores: float64 [1, G].
        """
        losses = [of_cosines(cosines_of(embeddings, dim), scores[0], self.temperature) for dim in self.dims or (None,)]
        return torch.stack(losses).mean().to(embeddings.dtype).expand(embeddings.shape[1])

    def with_gradient(self, embeddings: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The losses of all samples [G], and the gradient of their mean with respect to `embeddings`."""
        leaf = embeddings.detach().requires_grad_()
        with torch.enable_grad():
            losses = self.of_samples(leaf, scores)
            losses.mean().backward()
        assert leaf.grad is not None
        return losses.detach(), leaf.grad


def cosines_of(embeddings: Tensor, dim: int | None = None) -> Tensor:
    """The cosine of both texts of each sample, [G], by the first `dim` dimensions of the embeddings [2, G, width]."""
    first, second = F.normalize(embeddings[..., :dim], dim=-1)
    return (first * second).sum(-1)


def of_cosines(cosines: Tensor, scores: Tensor, temperature: float) -> Tensor:
    """The loss of a batch with these cosines [G] and scores float64 [G], a number in float64.

    The memory is that of G numbers: of the samples in the order of their scores, those with a lower score come first.
    """
    order = scores.argsort(stable=True)
    ordered, scaled = scores[order], cosines.double()[order] / temperature
    lower = torch.cat([scaled.new_full((1,), -torch.inf), scaled.logcumsumexp(0)])
    sums = lower[torch.searchsorted(ordered, ordered)]  # log of the sum of exp(c_i) over all samples with a lower score
    return torch.cat([scaled.new_zeros(1), sums - scaled]).logsumexp(0)
