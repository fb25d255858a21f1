"""Cuts a global batch into micro-batches of even cost within a budget, and assigns them to processes.

Lengths are those of the rows of a step or of an evaluation, longest first. A cut is the first row of each piece.
"""

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

MOST_ROWS_CUT_BEST = 256  # rows of a step; for more, the search is slow and saves less than half a percent


@dataclass(frozen=True)
class Budget:
    """The limits of a micro-batch; None: no limit."""

    tokens: int | None = None  # rows x longest row, or the sum of the lengths if `packed`
    samples: int | None = None
    packed: bool = False  # without padding

    def area(self, lengths: list[int]) -> int:
        """The limit in tokens; without one, the tokens of all rows in one micro-batch."""
        return self.tokens if self.tokens is not None else self.size(lengths, 0, len(lengths))

    def size(self, lengths: list[int], start: int, end: int) -> int:
        """The tokens of the rows from `start` to before `end` in one micro-batch."""
        return sum(lengths[start:end]) if self.packed else lengths[start] * (end - start)

    def fill(self, lengths: list[int], area: int) -> list[int]:
        """The cut whose pieces take, one after the other, as many rows as fit into `area` tokens."""
        ends = [0, *accumulate(lengths)] if self.packed else []
        most, starts, row = self.samples or len(lengths), [], 0
        while row < len(lengths):
            starts.append(row)
            fitting = bisect_right(ends, ends[row] + area) - 1 - row if self.packed else area // max(1, lengths[row])
            row += max(1, min(fitting, most))
        return starts

    def count(self, lengths: list[int], at_least: int) -> int:
        """The number of micro-batches: `at_least` or, if the limits need more, the next of 1, 2, 4, 8, 16, 24, 32, ...

        These numbers divide well among processes, and depend only on the limits. It is at most the number of rows.
        """
        if (needed := len(self.fill(lengths, self.area(lengths)))) > at_least:
            at_least = next((k for k in (1, 2, 4, 8) if k >= needed), -(-needed // 8) * 8)
        return min(at_least, len(lengths))


def cut_points(lengths: list[int], budget: Budget, count: int) -> list[int]:
    """The cut into micro-batches of even cost; `count`, their number, is at least `budget.count`."""
    rows, area = len(lengths), budget.area(lengths)
    if lengths[0] == lengths[-1]:
        return [piece * rows // count for piece in range(count)]
    low, high = max(lengths[0], sum(lengths) // count) - 1, area  # find the smallest that gives `count` pieces
    while high - low > max(1, high // 256):  # more precision than half a percent gains nothing
        middle = (low + high) // 2
        low, high = (middle, high) if len(budget.fill(lengths, middle)) > count else (low, middle)
    starts = _halve_largest(lengths, budget, budget.fill(lengths, high), count)
    if budget.packed or rows > MOST_ROWS_CUT_BEST or count == 1:
        return starts
    largest = max(budget.size(lengths, *piece) for piece in zip(starts, [*starts[1:], rows], strict=True))
    # Few pieces must be even, or a process with a large one delays the others. Of many, each process has several.
    limit = min(area, largest * 5 // 4) if count >= 16 else largest
    return _least_padding(lengths, count, limit, budget.samples or rows)


def _halve_largest(lengths: list[int], budget: Budget, starts: list[int], count: int) -> list[int]:
    """The cut into `count` pieces: the largest of the pieces at `starts` is halved until there are as many."""
    divisible: list[tuple[int, int, int]] = []  # a heap: hundreds of processes need hundreds of pieces in each step

    def add(start: int, end: int) -> None:
        if end - start > 1:
            heapq.heappush(divisible, (-budget.size(lengths, start, end), -start, end))

    for start, end in zip(starts, [*starts[1:], len(lengths)], strict=True):
        add(start, end)
    while len(starts) < count:
        _, negative, end = heapq.heappop(divisible)
        middle = (end - negative + 1) // 2
        starts.append(middle)
        add(-negative, middle)
        add(middle, end)
    return sorted(starts)


def _least_padding(lengths: list[int], count: int, limit: int, row_limit: int) -> list[int]:
    """The cut into `count` pieces with the least padding, each within `limit` tokens and `row_limit` rows.

    Dynamic programming over (pieces, rows); padding is 1-3 % of the area less than with an even cut.
    """
    rows = len(lengths)
    ends = np.arange(rows + 1)
    size = ends[:, None] - np.arange(rows)  # [end, first row]: rows of a piece
    area = size * np.asarray(lengths)
    area = np.where((size > 0) & (size <= row_limit) & (area <= limit), area, np.inf).astype(np.float32)
    least, came_from = area[:, 0], []  # [end]: smallest total area of the rows before `end`, with the pieces so far
    for _ in range(count - 1):
        total = area + least[:rows]
        came_from.append(total.argmin(1))
        least = total[ends, came_from[-1]]
    cut = [rows]
    for first in reversed(came_from):
        cut.append(int(first[cut[-1]]))
    return [0, *cut[:0:-1]]


def costs_of(lengths: NDArray[np.integer], starts: Sequence[int], packed: bool) -> list[int]:
    """The relative cost of each micro-batch: linear layers, and attention, which grows with the square of the length.

    Both cost the same at a length of 6 times the width of an encoder, 2,048 for small ones. The estimate only affects
    which process computes a micro-batch.
    """
    longest = lengths[starts]
    tokens = np.add.reduceat(lengths, starts) if packed else longest * np.diff([*starts, len(lengths)])
    return (tokens * (2048 + longest)).tolist()


def share(costs: Sequence[int], num_processes: int, equal_counts: bool = False) -> list[list[int]]:
    """Assign micro-batches, the costliest first, each to the least loaded process: ascending indices per process.

    With `equal_counts` no process gets more micro-batches than their number divided by `num_processes`, rounded up.
    """
    limit = -(-len(costs) // num_processes) if equal_counts else len(costs)
    assigned: list[list[int]] = [[] for _ in range(num_processes)]
    loads = [(0, process) for process in range(num_processes)]  # a heap
    for index in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, process = heapq.heappop(loads)
        assigned[process].append(index)
        if len(assigned[process]) < limit:
            heapq.heappush(loads, (load + costs[index], process))
    return [sorted(indices) for indices in assigned]
