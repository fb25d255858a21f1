"""Cuts a global batch into micro-batches of even cost within a budget, and assigns them to processes."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shared.errors import UserError

MOST_ROWS_CUT_BEST = 256  # rows of a step; for more, the search is slow and saves less than half a percent


def cut_points(
    lengths: list[int],
    max_tokens: int | None,
    max_samples: int | None,
    at_least: int,
    packed: bool = False,
) -> list[int]:
    """Cut rows, sorted by length, longest first, into micro-batches of even cost: the first row of each.

    The other arguments are those of `piece_count`.
    """
    rows = len(lengths)
    area = area_limit(lengths, max_tokens, packed)
    row_limit = min(max_samples or rows, rows)
    count = piece_count(lengths, max_tokens, max_samples, at_least, packed)
    if lengths[0] == lengths[-1]:
        return [piece * rows // count for piece in range(count)]
    low, high = max(lengths[0], sum(lengths) // count) - 1, area  # find the smallest that gives `count` pieces
    while high - low > max(1, high // 256):  # more precision than half a percent gains nothing
        middle = (low + high) // 2
        low, high = (middle, high) if len(fill_in_order(lengths, middle, row_limit, packed)) > count else (low, middle)
    starts = _halve_largest(lengths, fill_in_order(lengths, high, row_limit, packed), count, packed)
    if packed or rows > MOST_ROWS_CUT_BEST or count == 1:
        return starts
    largest = max(lengths[start] * (end - start) for start, end in zip(starts, [*starts[1:], rows], strict=True))
    # Few pieces must be even, or a process with a large one delays the others. Of many, each process has several.
    limit = min(area, largest * 5 // 4) if count >= 16 else largest
    return _least_padding(lengths, count, limit, row_limit)


def _halve_largest(lengths: list[int], starts: list[int], count: int, packed: bool) -> list[int]:
    """The first row of each of `count` pieces: the largest of the pieces at `starts` is cut in half until there are."""
    rows = len(lengths)

    def entry(start: int, end: int) -> tuple[int, int, int]:
        return -(sum(lengths[start:end]) if packed else lengths[start] * (end - start)), -start, end

    pieces = [entry(start, end) for start, end in zip(starts, [*starts[1:], rows], strict=True) if end - start > 1]
    heapq.heapify(pieces)
    starts = list(starts)
    while len(starts) < count:
        _, negative, end = heapq.heappop(pieces)
        middle = (end - negative + 1) // 2
        starts.append(middle)
        for half in ((-negative, middle), (middle, end)):
            if half[1] - half[0] > 1:
                heapq.heappush(pieces, entry(*half))
    return sorted(starts)


def _least_padding(lengths: list[int], count: int, limit: int, row_limit: int) -> list[int]:
    """The first row of each of `count` pieces with the least padding, each within area `limit` and `row_limit` rows.

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


def piece_count(
    lengths: list[int],
    max_tokens: int | None,
    max_samples: int | None,
    at_least: int,
    packed: bool = False,
) -> int:
    """The number of micro-batches for rows that are sorted by length, longest first.

    It is `at_least`, or, if the budgets need more, the next of 1, 2, 4, 8, 16, 24, 32, ...: these numbers divide well
    among processes, and depend only on the budgets. It is at most the number of rows.
    """
    rows = len(lengths)
    area = area_limit(lengths, max_tokens, packed)
    if (needed := len(fill_in_order(lengths, area, min(max_samples or rows, rows), packed))) > at_least:
        at_least = next((k for k in (1, 2, 4, 8) if k >= needed), -(-needed // 8) * 8)
    return min(at_least, rows)


def area_limit(lengths: list[int], max_tokens: int | None, packed: bool) -> int:
    """The budget in tokens; without a budget, the tokens of all rows together, with padding unless `packed`."""
    if max_tokens is not None:
        return max_tokens
    return sum(lengths) if packed else len(lengths) * lengths[0]


def fill_in_order(lengths: list[int], area: int, row_limit: int, packed: bool = False) -> list[int]:
    """The first row of each piece of a greedy cut: rows x longest, or the sum if `packed`, stays within `area`."""
    starts: list[int] = []
    filled = 0  # tokens of the last piece
    if packed:
        for row, length in enumerate(lengths):
            if not starts or filled + length > area or row - starts[-1] == row_limit:
                starts.append(row)
                filled = 0
            filled += length
        return starts
    row = 0
    while row < len(lengths):
        starts.append(row)
        row += max(1, min(area // lengths[row], row_limit))
    return starts


def costs_of(lengths: NDArray[np.integer], starts: Sequence[int], packed: bool) -> list[int]:
    """The relative cost of each micro-batch: linear layers, and attention, which grows with the square of the length.

    Both cost the same at a length of 6 times the width of an encoder, 2,048 for small ones. The estimate only affects
    which process computes a micro-batch.

    Args:
        lengths: [rows], longest first.
        starts: the first row of each micro-batch.
        packed: as for `cut_points`.
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


def check_budget(longest: int, length: int, max_tokens: int, flag: str) -> None:
    """Refuse a token budget that is smaller than the longest sample.

    Args:
        longest: the number of that sample.
        length: its tokens.
        max_tokens: the budget, which `flag` set.

    Raises:
        UserError: names the sample, its length and the flag.
    """
    if length > max_tokens:
        raise UserError(
            f"{flag} {max_tokens} is smaller than sample {longest}, which has {length} tokens: raise it to {length} or "
            "more, or lower --max_length"
        )
