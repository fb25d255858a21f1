"""What pairs of texts are trained and evaluated for: to find the positive of an anchor, or to order pairs by scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shared.contrastive import retrieval
from shared.contrastive.retrieval import SCORES_AT_ONCE  # with their graph they need several times the memory
from shared.contrastive.tuples import TextTuples
from shared.errors import UserError
from shared.metrics.functions import SHIPPED
from shared.models.linear_layers import without_tf32
from shared.processes.collectives import on_main_process

# Pairs of fields that exclude each other: a pair with a score has no negatives and is searched by nobody.
WITHOUT_SCORES = tuple(("label_column_name", name) for name in ("symmetric", "false_negative_margin", "corpus_file"))


def check_dims(dims: Sequence[int], width: int) -> None:
    """Check --matryoshka_dims for embeddings of `width` dimensions.

    Raises:
        UserError: one of them exceeds the width, or is given twice.
    """
    if any(dim > width for dim in dims) or len({*dims}) < len(dims):
        raise UserError(
            f"--matryoshka_dims {' '.join(map(str, dims))}: the embeddings have {width} dimensions: use different "
            f"numbers up to {width}"
        )


@dataclass(frozen=True)
class RankingLoss:
    """The multiple-negatives ranking loss, also called InfoNCE: the positive of a text among all texts of its batch.

    Henderson et al., 2017 (arXiv:1705.00652); van den Oord et al., 2018 (arXiv:1807.03748). A batch of G samples has
    the anchors a, the positives p and, optionally, hard negatives n, o, ... The loss of sample i is the cross entropy
    of

        softmax over j of cosine(a_i, c_j) / temperature,  candidates c = (p_1, ..., p_G, n_1, ..., n_G, o_1, ...)

    for the candidate p_i. A candidate that is known to fit a_i is no negative, and is left out: another p_j if a_j or
    p_j is the same text as a_i or p_i, and a hard negative that is the same text as p_i. With a margin, so is a
    candidate that is much more similar to a_i than p_i is.

    Attributes:
        temperature: divides the cosines.
        symmetric: the mean of this loss and of the loss of finding the anchor of each positive among all anchors.
        margin: a candidate whose cosine exceeds that of the positive by more than this is taken for a positive that
            nobody marked, and is left out: GISTEmbed (Solatorio, 2024, arXiv:2402.16829), guided by the trained model
            itself as in Qwen3 Embedding (Zhang et al., 2025, arXiv:2506.05176). None: no candidate is.
        dims: the mean of the losses of the first d dimensions of the embeddings, for each d: Matryoshka representation
            learning (Kusupati et al., 2022, arXiv:2205.13147). Empty: the loss of all dimensions.
    """

    temperature: float
    symmetric: bool = False
    dims: tuple[int, ...] = ()
    margin: float | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the scores, without the prefix "eval_"; the first is the main one."""
        return (*retrieval.NAMES, *(f"{retrieval.NAMES[0]}_dim_{dim}" for dim in self.dims))

    def of_samples(self, embeddings: Tensor, digests: Tensor, rows: slice = slice(None)) -> Tensor:
        """The losses of the samples `rows` of a batch, [rows].

        Args:
            embeddings: [texts, G, width]: anchors, positives and, optionally, hard negatives. Not normalized.
            digests: int64 [texts, G], equal for equal texts.
        """
        own = torch.arange(embeddings.shape[1], device=embeddings.device)
        same = (digests[0, rows, None] == digests[0]) | (digests[1, rows, None] == digests[1])
        same &= own[rows, None] != own
        left_out = [same, *(digests[1, rows, None] == negatives for negatives in digests[2:])]
        losses = []
        for dim in self.dims or (embeddings.shape[2],):
            anchors, *candidates = F.normalize(embeddings[..., :dim], dim=-1)
            loss = self._cross_entropy(anchors[rows], torch.cat(candidates), torch.cat(left_out, 1), own[rows])
            if self.symmetric:
                loss = (loss + self._cross_entropy(candidates[0][rows], anchors, same, own[rows])) / 2
            losses.append(loss)
        return torch.stack(losses).mean(0)

    def _cross_entropy(self, queries: Tensor, candidates: Tensor, left_out: Tensor, targets: Tensor) -> Tensor:
        """Losses [rows] of normalized queries [rows, dim] that look for the candidates [n, dim] at `targets` [rows]."""
        cosines = queries @ candidates.T
        if self.margin is not None:
            positive = cosines.detach().gather(1, targets[:, None])
            left_out = left_out | (cosines > positive + self.margin).scatter(1, targets[:, None], False)
        return F.cross_entropy(
            (cosines / self.temperature).masked_fill(left_out, -torch.inf), targets, reduction="none"
        )

    def evaluate(self, accelerator: Any, embeddings: Sequence[Tensor], data: TextTuples) -> dict[str, float]:
        """The loss and the scores of `retrieval.evaluate`: each anchor searches all positives, and the corpus.

        Args:
            accelerator: every process calls this. None: this process computes all.
            embeddings: of each of `data.texts`, normalized: the anchors and the positives [N, width], and the corpus.
        """
        task = retrieval.retrieval_task(*(data.digests_of(place) for place in range(len(embeddings))))
        anchors, documents = embeddings[0], torch.cat([*embeddings[1:]])
        found = retrieval.evaluate(accelerator, anchors, documents, task, self.temperature, self.dims)
        return dict(zip((f"eval_{name}" for name in ("loss", *self.names)), found, strict=True))


@dataclass(frozen=True)
class CosentLoss:
    """The CoSENT loss: the cosines of pairs of texts should have the order of the scores of these pairs.

    Su, 2022 (https://kexue.fm/archives/8847). The loss of a batch of G pairs with the cosines c and the scores s is

        log(1 + sum over all i, j with s_i < s_j of exp((c_i - c_j) / temperature))

    Only the order of the scores matters, so they may have any scale.

    Attributes:
        temperature: divides the cosines.
        dims: the mean of the losses of the first d dimensions of the embeddings, for each d; see `RankingLoss`.
    """

    temperature: float
    dims: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return ("spearman", "pearson", *(f"spearman_dim_{dim}" for dim in self.dims))

    def of_samples(self, embeddings: Tensor, scores: Tensor, rows: slice = slice(None)) -> Tensor:
        """The loss of a batch, for each of the samples `rows`, [rows]: it belongs to the batch as a whole.

        `embeddings` [2, G, width] are those of the first and second texts, not normalized. `scores`: float64 [1, G].
        """
        losses = [of_cosines(cosines_of(embeddings, dim), scores[0], self.temperature) for dim in self.dims or (None,)]
        return torch.stack(losses).mean().to(embeddings.dtype).expand(embeddings.shape[1])[rows]

    def evaluate(self, accelerator: Any, embeddings: Sequence[Tensor], data: TextTuples) -> dict[str, float]:
        """The loss of all pairs as one batch, and the correlations of their cosines with their scores."""
        targets, both = data.scores, torch.stack([*embeddings])
        assert targets is not None

        def compute() -> dict[str, float]:
            of_dims = [cosines_of(both, dim).double() for dim in (None, *self.dims)]
            loss = of_cosines(of_dims[0], torch.tensor(targets, device=both.device), self.temperature)
            spearman, *others = (SHIPPED["spearman"](cosines.cpu().numpy(), targets) for cosines in of_dims)
            found = float(loss), spearman, SHIPPED["pearson"](of_dims[0].cpu().numpy(), targets), *others
            return dict(zip((f"eval_{name}" for name in ("loss", *self.names)), found, strict=True))

        return compute() if accelerator is None else on_main_process(accelerator, compute)


@without_tf32()  # the temperature would enlarge its rounding errors
def with_gradient(loss: RankingLoss | CosentLoss, embeddings: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of all samples [G], and the gradient of their mean with respect to `embeddings`.

    At most SCORES_AT_ONCE similarities per term are in memory at a time, besides those of one sample.
    """
    texts, size, _ = embeddings.shape
    leaf, losses = embeddings.detach().requires_grad_(), []
    at_once = size if isinstance(loss, CosentLoss) else max(1, SCORES_AT_ONCE // (size * (texts - 1)))
    with torch.enable_grad():
        for first in range(0, size, at_once):
            part = loss.of_samples(leaf, targets, slice(first, first + at_once))
            (part.sum() / size).backward()
            losses.append(part.detach())
    assert leaf.grad is not None
    return torch.cat(losses), leaf.grad


def objective_of(config: Any) -> RankingLoss | CosentLoss:
    """The objective of a run: pairs with --label_column_name have scores."""
    dims = config.matryoshka_dims or ()
    if config.label_column_name:
        return CosentLoss(config.temperature, dims)
    return RankingLoss(config.temperature, config.symmetric, dims, config.false_negative_margin)


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
