"""`--fixed_shapes`: all packed micro-batches have the same shapes, so that layers are compiled for known sizes.

A micro-batch is filled up to its budget with documents that count nothing: they have no loss and no metric, and no
document attends to them. The boundaries of the documents are an array of fixed length; the documents at its end are
empty. The length of the longest document is rounded up to one of BUCKETS lengths, which is all that varies.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

BUCKETS = 4  # lengths to which that of the longest document is rounded up; each compiles the layers once


@dataclass(frozen=True)
class FixedShapes:
    """The shapes of all packed micro-batches of a run."""

    tokens: int
    """Tokens of a micro-batch, including filling."""
    documents: int
    """Documents of a micro-batch, including those of filling and empty ones."""
    step: int
    """The length of the longest document is rounded up to a multiple of this many tokens."""
    longest: int
    """The longest that a document can be."""

    @classmethod
    def of_run(cls, config: Any, texts: int = 1) -> "Self | None":
        """The shapes that a config with the fields of `TextOptions` asks for; None without --fixed_shapes.

        Each sample has this number of `texts`, which are documents of their own.
        """
        if not getattr(config, "fixed_shapes", False):
            return None
        rows = min(config.global_batch_size, config.per_device_train_batch_size or config.global_batch_size)
        return cls.of_sizes(config.max_tokens_per_micro_batch, rows * texts, config.max_length)

    @classmethod
    def of_sizes(cls, tokens: int, documents: int, longest: int) -> Self:
        """For micro-batches of at most `tokens` tokens and `documents` documents, of at most `longest` tokens each."""
        step = -(-longest // BUCKETS)
        documents += -(-tokens // step)
        documents += documents == tokens  # a tensor then has one entry per token or per document, and its length tells
        return cls(tokens, documents, step, longest)

    @classmethod
    def for_trial(cls, lengths: NDArray[np.int64]) -> Self:
        """Small shapes for documents of these `lengths` [n], with filling and with empty documents."""
        longest = int(lengths.max())
        return cls.of_sizes(int(lengths.sum()) + longest + 1, len(lengths), longest)

    def fill(self, lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
        """Fill a micro-batch of documents of these `lengths` [n].

        Returns:
            The lengths of the documents that fill it, int64 [m]; the boundaries of all documents, int64
            [documents + 1]; and the rounded length of the longest document.
        """
        bucket = min(-(-int(lengths.max()) // self.step) * self.step, self.longest)
        missing = self.tokens - int(lengths.sum())
        whole, rest = divmod(missing, bucket)
        filling = np.array([bucket] * whole + [rest] * (rest > 0), np.int64)
        used = len(lengths) + len(filling)
        assert missing >= 0, "the plan keeps to the budget"
        assert used <= self.documents, "the plan keeps to the number of rows"
        sizes = np.concatenate([lengths, filling, np.zeros(self.documents - used, np.int64)])
        return filling, np.concatenate([[0], np.cumsum(sizes)]), bucket
