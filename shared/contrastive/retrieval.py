"""Retrieval scores: how well the embedding of an anchor finds its positive among all positives of a data set."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from shared.monitoring.evaluation import gather_rows
from shared.plan.batches import MicroBatch
from shared.processes import preemption
from shared.processes.starting import without_tf32

DEPTH = 10  # the scores look at the first ten results of a search
SCORES_AT_ONCE = 2**24  # similarities in memory at a time: 64 MiB
NAMES = ("ndcg_at_10", "recall_at_10", "mrr_at_10")


def names(dims: Sequence[int] = ()) -> tuple[str, ...]:
    """The names of the scores that `evaluate` computes for these `dims`."""
    return (*NAMES, *(f"{NAMES[0]}_dim_{dim}" for dim in dims))


@dataclass(frozen=True)
class Task:
    """The queries and documents of a retrieval task, in which equal texts count once.

    Attributes:
        queries: int64 [queries], the row of the first sample with this anchor.
        documents: int64 [documents], the row of the first sample with this positive.
        pairs: int64 [pairs, 2], query and document of each distinct sample, sorted: the relevant documents.
    """

    queries: NDArray[np.int64]
    documents: NDArray[np.int64]
    pairs: NDArray[np.int64]

    @classmethod
    def of_digests(cls, anchors: NDArray[np.int64], positives: NDArray[np.int64]) -> "Task":
        """The task of samples whose texts have these digests, [N] each."""
        _, queries, query_of = np.unique(anchors, return_index=True, return_inverse=True)
        _, documents, document_of = np.unique(positives, return_index=True, return_inverse=True)
        return cls(queries, documents, np.unique(np.stack([query_of, document_of], axis=1), axis=0))

    def within(self, first: int, end: int) -> NDArray[np.int64]:
        """The pairs of the queries `first` to `end`; their queries are counted from `first`."""
        start, stop = np.searchsorted(self.pairs[:, 0], (first, end))
        return self.pairs[start:stop] - (first, 0)


def embed_texts(
    accelerator: Any,
    model: Any,
    batches: Iterable[Iterable[tuple[MicroBatch, Any]]],
    predict: Callable[[Any, MicroBatch, Any], Tensor],
    counts: Iterable[int],
    width: int,
) -> list[Tensor] | None:
    """The embeddings of several data sets, [counts[i], width] each, on every process; each process computes its share.

    Every process calls this.

    Args:
        accelerator: sums over the processes.
        model: as the loop calls it; it is in evaluation mode during the pass.
        batches: those of this process, for each data set.
        predict: called with the unwrapped model, the micro-batch and its batch; returns the embeddings [texts, width].
        counts: texts of each data set.
        width: of an embedding.

    Returns:
        None if a signal interrupted the pass.
    """
    model = accelerator.unwrap_model(model).eval()  # DDP's wrapper would wait for processes that have no batch
    counts = list(counts)
    samples: list[list[NDArray[np.int64]]] = [[np.empty(0, np.int64)] for _ in counts]
    rows = [[torch.empty(0, width, device=accelerator.device)] for _ in counts]
    numbered = chain.from_iterable(((number, each) for each in part) for number, part in enumerate(batches))
    with torch.inference_mode():
        for number, (micro_batch, batch) in preemption.watch(accelerator, numbered):
            embeddings = predict(model, micro_batch, batch)
            if micro_batch.counted:
                samples[number].append(micro_batch.samples)
                rows[number].append(embeddings)
    model.train()
    if preemption.cut_short(accelerator):
        return None
    found = zip(samples, rows, counts, strict=True)
    return [gather_rows(accelerator, np.concatenate(mine), torch.cat(parts), total) for mine, parts, total in found]


def evaluate(
    accelerator: Any, anchors: Tensor, positives: Tensor, task: Task, temperature: float, dims: tuple[int, ...] = ()
) -> dict[str, float]:
    """The loss and the retrieval scores of the embeddings of all anchors and positives, [N, width] each.

    Every process calls this and gets the same values. Processes share the queries, in parts that do not depend on
    the number of processes.

    Returns:
        loss, the cross entropy of softmax(cosine / temperature) over all documents except the other relevant ones; the
        scores of NAMES; and ndcg_at_10_dim_D of the first D dimensions, for each of `dims`.
    """
    share = accelerator.process_index, accelerator.num_processes
    numbers, rows = figures_of_share(anchors, positives, task, temperature, dims, *share)
    return means(gather_rows(accelerator, numbers, rows, len(task.queries)), task, dims)


def evaluate_alone(
    anchors: Tensor, positives: Tensor, task: Task, temperature: float, dims: tuple[int, ...] = ()
) -> dict[str, float]:
    """The values of `evaluate`, computed by one process."""
    _, rows = figures_of_share(anchors, positives, task, temperature, dims, 0, 1)
    return means(rows, task, dims)


@without_tf32()
def figures_of_share(
    anchors: Tensor,
    positives: Tensor,
    task: Task,
    temperature: float,
    dims: tuple[int, ...],
    process_index: int,
    num_processes: int,
) -> tuple[NDArray[np.int64], Tensor]:
    """The queries of one process, [n], and their `figures` for all dimensions and each of `dims`, [n, 4 + 4 dims]."""
    at_once = max(1, SCORES_AT_ONCE // len(task.documents))
    parts = range(0, len(task.queries), at_once)[process_index::num_processes]
    columns, numbers = [], [np.empty(0, np.int64), *(np.arange(len(task.queries))[f : f + at_once] for f in parts)]
    for dim in (anchors.shape[1], *dims):
        queries, documents = (
            F.normalize(found[torch.from_numpy(rows).to(found.device), :dim], dim=1)
            for found, rows in ((anchors, task.queries), (positives, task.documents))
        )
        found = [torch.empty(0, 4, dtype=torch.float64, device=anchors.device)]
        for first in parts:
            chunk = queries[first : first + at_once] @ documents.T
            found.append(figures(chunk, task.within(first, first + len(chunk)), temperature))
        columns.append(torch.cat(found))
    return np.concatenate(numbers), torch.cat(columns, dim=1)


def means(table: Tensor, task: Task, dims: tuple[int, ...]) -> dict[str, float]:
    """The result of `evaluate`, from the `figures_of_share` of all queries in their order."""
    sums = table.sum(0).view(-1, 4).tolist()  # [loss, *NAMES] of each number of dimensions
    totals = [*sums[0][1:], *(ndcg for _, ndcg, *_ in sums[1:])]
    scores = {name: total / len(task.queries) for name, total in zip(names(dims), totals, strict=True)}
    return {"loss": sums[0][0] / len(task.pairs)} | scores


def figures(similarity: Tensor, pairs: NDArray[np.int64], temperature: float) -> Tensor:
    """The sum of the losses of its pairs, nDCG@10, recall@10 and MRR@10 of each query, float64 [queries, 4].

    Args:
        similarity: [queries, documents].
        pairs: int64 [pairs, 2], query and document of all relevant documents; each query has at least one.
        temperature: divides the similarities in the loss.
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
    ideal = gains.cumsum(0)[total.clamp(max=depth) - 1]
    reciprocal = (hits / places).max(1).values
    return torch.stack([loss, (hits * gains).sum(1) / ideal, hits.sum(1) / total, reciprocal], dim=1)
