"""Mine hard negatives: add to each pair of a file the positives of other pairs that a model finds most similar.

    python -m shared.mine_negatives OUTPUT_DIR FILE --predictions_file NEW_FILE [FLAGS]

OUTPUT_DIR is the folder of a run of recipes/embeddings.py, or of a model of sentence-transformers. FILE has pairs in
the first two of --text_column_names. NEW_FILE, .parquet or .jsonl, has the rows of FILE and a column `negatives` with
lists of texts. Train on it with --text_column_names ANCHOR POSITIVE negatives. Rows with too few candidates are left
out.

The file is complete or absent. `accelerate launch` starts several processes, as for shared.predict. Start an
interrupted command again to resume.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.config.fields import Share
from shared.contrastive.retrieval import SCORES_AT_ONCE, retrieval_task
from shared.contrastive.tuples import FLAG, of_columns
from shared.errors import UserError, say
from shared.models.linear_layers import without_tf32
from shared.plan.draws import Ints
from shared.predict import predict
from shared.predictions.embeddings import predict_embeddings
from shared.predictions.prediction import BLOCK_ROWS, Outputs, Prediction
from shared.predictions.request import Flags, Request, parse_request
from shared.run.recipes import run_work

COLUMN = "negatives"


@dataclass(frozen=True, kw_only=True)
class MiningFlags(Flags):
    """The flags that only this command has."""

    negatives: int = 4
    """Negatives of each pair."""
    share_of_positive: Share = 0.95
    """A negative's cosine with the anchor is at most this share of the positive's: other texts may answer it, too."""
    scores: bool = False
    """Also compute how well the model finds the positives of the file, which takes as long as the search."""


def parse_mining(words: list[str]) -> Request:
    """What a command line asks for.

    Raises:
        UserError: see `parse_request`, or the command line does not name an embeddings model, FILE, two columns or
            NEW_FILE; or --corpus_file would have no effect.
    """
    request = parse_request(words, MiningFlags)
    if request.kind != "embeddings":
        raise UserError(f"{request.model} has no sentence embeddings: give a model of recipes/embeddings.py")
    if request.file is None or "predictions_file" not in request.given:
        raise UserError("give a FILE of pairs, and name the file to write with --predictions_file")
    names = request.config.text_column_names
    if len({*names[:2]}) < 2:
        raise UserError(f"{FLAG} {' '.join(names)}: name the column of the anchors and that of the positives")
    if "corpus_file" in request.given and not request.config.scores:
        raise UserError("--corpus_file has no effect on negatives, which are texts of FILE: leave it out")
    pair = of_columns(request.config, names[:2])
    return replace(request, config=pair, given=request.given | {"text_column_names"})


def mine(accelerator: Any, request: Request) -> Prediction:
    """The pairs of FILE with their negatives.

    Raises:
        UserError: the model or the rows cannot be used; when `blocks` is called, no row has enough negatives.
    """
    prediction = predict_embeddings(accelerator, request)
    source, table, count = prediction.source, prediction.table, request.config.negatives
    positive, share = request.config.text_column_names[1], request.config.share_of_positive
    digests = prediction.data.digests_of(0), prediction.data.digests_of(1)

    def blocks(outputs: Outputs) -> Iterator[pa.Table]:
        anchors, positives = (torch.tensor(each, device=accelerator.device) for each in prediction.split(outputs))
        numbers, enough = hardest_negatives(anchors, positives, digests, count, share)
        few = f"rows of {source} have fewer than {count} texts with at most {share:g} of their positive's similarity"
        if not enough.any():
            raise UserError(f"all {few}: lower --negatives, raise --share_of_positive, or add pairs")
        if not enough.all():
            say(f"{np.count_nonzero(~enough):,} of {len(enough):,} {few}: they are left out")
        texts = table[positive].cast(pa.large_string()).combine_chunks()
        for start in range(0, len(enough), BLOCK_ROWS):
            kept = enough[start : start + BLOCK_ROWS]
            found = texts.take(pa.array(numbers[start : start + BLOCK_ROWS][kept].ravel()))
            block = table.slice(start, BLOCK_ROWS).filter(pa.array(kept))
            yield block.append_column(COLUMN, pa.FixedSizeListArray.from_arrays(found, count))

    empty = {COLUMN: pa.array([], pa.list_(pa.large_string(), count))}
    prediction.columns, prediction.blocks = lambda *_: empty, blocks
    return prediction


@without_tf32()
def hardest_negatives(
    anchors: Tensor, positives: Tensor, digests: tuple[Ints, Ints], count: int, share: float
) -> tuple[Ints, NDArray[np.bool_]]:
    """The most similar allowed negatives of each sample, the most similar one first.

    A negative is the positive of another sample. Its cosine with the anchor is at most `share` of the cosine of the
    anchor and its own positive, as in NV-Retriever (Moreira et al., 2024, arXiv:2407.15831): more similar texts often
    answer the anchor, too. It is no positive of the same anchor in any sample. Equal texts are one candidate. At most
    SCORES_AT_ONCE similarities are in memory at a time, or those of one sample.

    Args:
        anchors, positives: the normalized embeddings of the samples, [N, width] each.
        digests: int64 [N] each, of the anchors and positives; equal for equal texts.
        share: from 0 to 1. If the cosine of the positive is negative, its distance to the limit is the same as for a
            positive one.

    Returns:
        int64 [N, count], the numbers of the samples whose positives are the negatives; bool [N], which samples have so
        many. The numbers of the others mean nothing.
    """
    query_rows, document_rows, pairs = retrieval_task(*digests)
    queries = np.searchsorted(digests[0][query_rows], digests[0])  # of each sample
    first, end = (np.searchsorted(pairs[:, 0], queries, side) for side in ("left", "right"))
    documents = positives[torch.from_numpy(document_rows).to(positives.device)]
    size, depth = len(documents), min(count, len(documents))
    numbers, enough = np.zeros((len(anchors), count), np.int64), np.zeros(len(anchors), bool)
    at_once = max(1, SCORES_AT_ONCE // size)
    for start in range(0, len(anchors), at_once):
        part = slice(start, start + at_once)
        similarity = anchors[part] @ documents.T
        of_positive = (anchors[part] * positives[part]).sum(1)
        limit = of_positive - (1 - share) * of_positive.abs()
        own = np.concatenate([pairs[a:b, 1] for a, b in zip(first[part], end[part], strict=True)])
        rows = np.arange(len(similarity)).repeat(end[part] - first[part])
        similarity[torch.from_numpy(rows), torch.from_numpy(own)] = -torch.inf
        found = similarity.masked_fill_(similarity > limit[:, None], -torch.inf).topk(depth, dim=1)
        numbers[part, :depth] = document_rows[found.indices.cpu().numpy()]
        enough[part] = (found.values > -torch.inf).sum(1).cpu().numpy() == count
    return numbers, enough


if __name__ == "__main__":
    run_work(lambda: predict(parse_mining(sys.argv[1:]), mine))
