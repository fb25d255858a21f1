"""Retrieval scores: how well the embedding of an anchor finds its positive among all positives of a data set."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shared.models.linear_layers import without_tf32
from shared.monitoring.evaluation import gather_rows
from shared.plan.draws import Ints

DEPTH = 10  # the scores look at the first ten results of a search
SCORES_AT_ONCE = 2**24  # similarities in memory at a time: 64 MiB
NAMES = ("ndcg_at_10", "recall_at_10", "mrr_at_10")


def retrieval_task(anchors: Ints, positives: Ints, *corpus: Ints) -> tuple[Ints, Ints, Ints]:
    """The retrieval task of samples whose texts have these digests, [N] each. Equal texts count once.

    The texts of `corpus` are documents, too; their rows come after those of all samples.

    Returns:
        queries: int64 [queries], the row of the first sample with this anchor.
        documents: int64 [documents], the row of the first sample with this positive.
        pairs: int64 [pairs, 2], query and document of each distinct sample, sorted: the relevant documents.
    """
    _, queries, query_of = np.unique(anchors, return_index=True, return_inverse=True)
    _, documents, document_of = np.unique(np.concatenate([positives, *corpus]), return_index=True, return_inverse=True)
    relevant = document_of[: len(positives)]
    return queries, documents, np.unique(np.stack([query_of, relevant], axis=1), axis=0)


@without_tf32()
def evaluate(
    accelerator: Any,
    anchors: Tensor,
    positives: Tensor,
    task: tuple[Ints, Ints, Ints],
    temperature: float,
    dims: tuple[int, ...] = (),
) -> list[float]:
    """The loss and the retrieval scores of the embeddings of all anchors and positives, [N, width] each.

    The embeddings of a corpus come after those of the positives. `task` is that of `retrieval_task`.

    Every process calls this and gets the same values. Processes share the queries, in parts that do not depend on
    the number of processes. Without an `accelerator`, this process computes all of them.

    Returns:
        loss, the cross entropy of softmax(cosine / temperature) over all documents except the other relevant ones; the
        scores of NAMES; and nDCG@10 of the first D dimensions, for each D of `dims`.
    """
    query_rows, document_rows, pairs = task

    def within(part: slice) -> Ints:
        """The pairs of a part of the queries; their queries are counted from its first one."""
        start, stop = np.searchsorted(pairs[:, 0], (part.start, part.stop))
        return pairs[start:stop] - (part.start, 0)

    process, processes = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
    count, at_once = len(query_rows), max(1, SCORES_AT_ONCE // len(document_rows))
    parts = [slice(first, min(first + at_once, count)) for first in range(0, count, at_once)][process::processes]
    columns = []
    for dim in (anchors.shape[1], *dims):
        queries, documents = (
            F.normalize(found[torch.from_numpy(rows).to(found.device), :dim], dim=1)
            for found, rows in ((anchors, query_rows), (positives, document_rows))
        )
        of_parts = [figures(queries[part] @ documents.T, within(part), temperature) for part in parts]
        columns.append(torch.cat([torch.empty(0, 4, dtype=torch.float64, device=anchors.device), *of_parts]))
    table = torch.cat(columns, dim=1)
    if accelerator:
        numbers = np.concatenate([np.empty(0, np.int64), *(np.arange(count)[part] for part in parts)])
        table = gather_rows(accelerator, numbers, table, count)
    sums = table.sum(0).view(-1, 4).tolist()  # [loss, *NAMES] of each number of dimensions
    totals = [*sums[0][1:], *(ndcg for _, ndcg, *_ in sums[1:])]
    return [sums[0][0] / len(pairs), *(total / count for total in totals)]


def figures(similarity: Tensor, pairs: Ints, temperature: float) -> Tensor:
    """The sum of the losses of its pairs, nDCG@10, recall@10 and MRR@10 of each query, float64 [queries, 4].

    Args:
        similarity: [queries, documents].
        pairs: int64 [pairs, 2], query and document of all relevant documents; each query has at least one.
    """
    count, device = len(similarity), similarity.device
    query, document = torch.from_numpy(pairs).to(device).T
    relevant = torch.zeros_like(similarity, dtype=torch.bool)
    relevant[query, document] = True
    total = relevant.sum(1)

    scores = similarity / temperature
    others = scores.masked_fill(relevant, -torch.inf).logsumexp(1)[query]
    own = scores[query, document]
    losses = (torch.logaddexp(own, others) - own).double()
    loss = losses.new_zeros(count).index_add_(0, query, losses)

    depth = min(DEPTH, similarity.shape[1])
    hits = relevant.gather(1, similarity.topk(depth, dim=1).indices).double()
    places = torch.arange(1, depth + 1, device=device, dtype=torch.float64)
    gains = 1 / (places + 1).log2()
    ideal = (gains * (places <= total[:, None])).sum(1)  # a GPU refuses `cumsum` of fractions with --deterministic
    reciprocal = (hits / places).max(1).values
    return torch.stack([loss, (hits * gains).sum(1) / ideal, hits.sum(1) / total, reciprocal], dim=1)
