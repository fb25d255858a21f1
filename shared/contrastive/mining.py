"""Hard negatives: the positives of other samples that a model finds most similar to an anchor.

The limit is the positive-aware one of NV-Retriever (Moreira et al., 2024, arXiv:2407.15831): texts that are almost as
similar to the anchor as its positive often answer it, too, so they are no negatives.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.contrastive.retrieval import SCORES_AT_ONCE, Task
from shared.processes.starting import without_tf32

Ints = NDArray[np.int64]


@without_tf32()
def hardest_negatives(
    anchors: Tensor, positives: Tensor, digests: tuple[Ints, Ints], count: int, share: float
) -> tuple[Ints, NDArray[np.bool_]]:
    """The most similar allowed negatives of each sample, the most similar one first.

    A negative is the positive of another sample. Its cosine with the anchor is at most `share` of the cosine of the
    anchor and its own positive. It is no positive of the same anchor in any sample. Equal texts are one candidate. At
    most SCORES_AT_ONCE similarities are in memory at a time, or those of one sample.

    Args:
        anchors, positives: the normalized embeddings of the samples, [N, width] each.
        digests: int64 [N] each, of the anchors and positives; equal for equal texts.
        count: negatives of a sample.
        share: from 0 to 1. If the cosine of the positive is negative, its distance to the limit is the same as for a
            positive one.

    Returns:
        int64 [N, count], the numbers of the samples whose positives are the negatives; bool [N], which samples have so
        many. The numbers of the others mean nothing.
    """
    task = Task.of_digests(*digests)
    queries = np.searchsorted(digests[0][task.queries], digests[0])  # of each sample
    first, end = (np.searchsorted(task.pairs[:, 0], queries, side) for side in ("left", "right"))
    documents = positives[torch.from_numpy(task.documents).to(positives.device)]
    size, depth = len(documents), min(count, len(documents))
    numbers, enough = np.zeros((len(anchors), count), np.int64), np.zeros(len(anchors), bool)
    at_once = max(1, SCORES_AT_ONCE // size)
    for start in range(0, len(anchors), at_once):
        part = slice(start, start + at_once)
        similarity = anchors[part] @ documents.T
        of_positive = (anchors[part] * positives[part]).sum(1)
        limit = of_positive - (1 - share) * of_positive.abs()
        own = np.concatenate([task.pairs[a:b, 1] for a, b in zip(first[part], end[part], strict=True)])
        rows = np.arange(len(similarity)).repeat(end[part] - first[part])
        similarity[torch.from_numpy(rows), torch.from_numpy(own)] = -torch.inf
        found = similarity.masked_fill_(similarity > limit[:, None], -torch.inf).topk(depth, dim=1)
        numbers[part, :depth] = task.documents[found.indices.cpu().numpy()]
        enough[part] = (found.values > -torch.inf).sum(1).cpu().numpy() == count
    return numbers, enough
