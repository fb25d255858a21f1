"""What pairs of texts are trained and evaluated for: to find the positive of an anchor, or to order pairs by scores."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared.contrastive import retrieval
from shared.contrastive.losses import CosentLoss, RankingLoss, cosines_of, of_cosines
from shared.contrastive.tuples import TextTuples
from shared.metrics.functions import SHIPPED
from shared.processes.collectives import on_main_process

# Pairs of fields that exclude each other: a pair with a score has no negatives and is searched by nobody.
WITHOUT_SCORES = tuple(("label_column_name", name) for name in ("symmetric", "false_negative_margin", "corpus_file"))
Scores = dict[str, float]


class Retrieval:
    """An anchor should find its positive.

    Args:
        config: of the recipe.

    Attributes:
        loss: of a batch.
        names: of the scores, without the prefix "eval_"; the first is the main one.
    """

    def __init__(self, config: Any) -> None:
        self.temperature, self.dims = config.temperature, config.matryoshka_dims or ()
        self.loss = RankingLoss(self.temperature, config.symmetric, self.dims, config.false_negative_margin)
        self.names = retrieval.names(self.dims)

    def evaluate(self, accelerator: Any, embeddings: Sequence[Tensor], data: TextTuples) -> Scores:
        """The loss and the scores of `retrieval.evaluate`: each anchor searches all positives, and the corpus.

        Args:
            accelerator: every process calls this. None: this process computes all.
            embeddings: of each of `data.texts`, normalized: the anchors and the positives [N, width], and the corpus.
            data: has the texts, which are compared by their tokens.
        """
        task = retrieval.Task.of_digests(*(data.digests_of(place) for place in range(len(embeddings))))
        anchors, documents = embeddings[0], torch.cat([*embeddings[1:]])
        scores = retrieval.evaluate(accelerator, anchors, documents, task, self.temperature, self.dims)
        return {f"eval_{name}": value for name, value in scores.items()}


class Similarity:
    """The cosines of pairs should have the order of their scores; see `Retrieval`."""

    def __init__(self, config: Any) -> None:
        self.temperature, self.dims = config.temperature, config.matryoshka_dims or ()
        self.loss = CosentLoss(self.temperature, self.dims)
        self.names = ("spearman", "pearson", *(f"spearman_dim_{dim}" for dim in self.dims))

    def evaluate(self, accelerator: Any, embeddings: Sequence[Tensor], data: TextTuples) -> Scores:
        """The loss of all pairs as one batch, and the correlations of their cosines with their scores."""
        targets, both = data.scores, torch.stack([*embeddings])
        assert targets is not None

        def compute() -> Scores:
            of_dims = [cosines_of(both, dim).double() for dim in (None, *self.dims)]
            loss = of_cosines(of_dims[0], torch.tensor(targets, device=both.device), self.temperature)
            all_dims, *others = (cosines.cpu().numpy() for cosines in of_dims)
            found = [SHIPPED["spearman"](all_dims, targets), SHIPPED["pearson"](all_dims, targets)]
            found += [SHIPPED["spearman"](cosines, targets) for cosines in others]
            return {"eval_loss": float(loss)} | dict(zip((f"eval_{name}" for name in self.names), found, strict=True))

        return compute() if accelerator is None else on_main_process(accelerator, compute)


def objective_of(config: Any) -> Retrieval | Similarity:
    """The objective of a run: pairs with --label_column_name have scores."""
    return Similarity(config) if config.label_column_name else Retrieval(config)
