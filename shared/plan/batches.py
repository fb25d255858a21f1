"""Which samples each process sees, in which micro-batch of which step: a pure function of the config.

The sample stream is the concatenation of the epochs' permutations; step k takes the samples [k*G, (k+1)*G) of it, its
global batch. The order inside a global batch does not matter, so its samples are sorted by length and cut into
micro-batches of even cost within a budget. The number of processes only determines which process computes which
micro-batch, not the cut (see `_count` for the exception). A resumed run asks the plan for the next step.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shared.config.options import Options
from shared.errors import UserError
from shared.plan.cutting import Budget, costs_of, cut_points, share
from shared.plan.draws import Ints, permutation

COMPARED = 1 << 14  # samples of the steps whose cuts are compared at the start: their lengths may be on a slow disk


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass of one process."""

    step: int
    index: int  # position among the micro-batches of the step; dropout is seeded from (seed, step, index)
    samples: Ints  # [rows] sample ids
    epochs: Ints  # [rows] the epoch each of them belongs to
    step_size: float  # number of samples, or sum of their weights, in the global batch: normalizes the loss
    counted: bool = True  # False: a repeat of weight 0, for a process that would otherwise miss a collective call
    last: bool = False  # the last of this process in this step: gradients are synchronized after it
    start: int = 0  # samples of the global batch in the micro-batches before it, in any process
    step_samples: int = 0  # number of samples in the global batch

    @property
    def normalizer(self) -> float:
        """The divisor for the sum of the rows' losses; infinity for a repeat, whose loss becomes 0."""
        return self.step_size if self.counted else float("inf")


@dataclass(kw_only=True, eq=False)
class Plan:
    """The steps of a run, as seen by one process.

    The cost of a step is a function of G. Nothing of N elements is copied: `lengths` and `weights` may be memory maps.
    `TrainingRun.prepare` or a hook sets the fields that are no arguments, and perhaps `equal_counts`: before that, the
    cut of a step is not final.

    Raises:
        UserError: G is smaller than the number of processes, or a sample does not fit the budget.
    """

    lengths: Any = None  # int [N], tokens of each sample; None if all samples have the same size
    num_samples: int = 0  # N; required if `lengths` is None
    padded: Callable[[Ints], Ints] = lambda lengths: lengths
    """The tokens that samples take when each is padded on its own, as a function of their lengths [n] that never
    decreases."""
    longest: int | None = None  # number of the longest sample; None: it is searched for, if there is a budget
    weights: Any = None
    """Each sample's share of the loss normalizer, such as its masked tokens: an array [N], or anything that gives those
    of some samples when indexed with them; None: 1 each."""
    packed: bool = False  # a micro-batch holds its samples end to end, without padding
    seed: int  # determines the order of the samples
    global_batch_size: int  # G, samples per optimizer step, over all processes and micro-batches
    num_epochs: int | None = None  # passes over the data; the last step may be smaller. Ignored if `max_steps` is given
    max_steps: int | None = None  # number of steps, over as many epochs as needed
    max_tokens: int | None = None  # budget of a micro-batch: rows x longest row, or the sum of the lengths if `packed`
    max_samples: int | None = None  # budget of a micro-batch in rows. If both are given, both apply
    micro_batches_per_step: int = 1  # a step is cut into at least this many
    num_processes: int = 1  # does not change the cut, except with `equal_counts` or more processes than micro-batches
    process_index: int = 0  # which process this is
    equal_counts: bool = False
    """Every process gets the same number of micro-batches, for models whose forward pass communicates (FSDP,
    SyncBatchNorm); the number per step then is a multiple of `num_processes`."""
    first_processes: int = field(default=1, init=False)
    """The processes of the first launch: each step has at least as many micro-batches, so a run that resumes on fewer
    has the same ones, and the same dropout and batch norm. `TrainingRun` sets it."""
    depends_on_processes: str = field(default="", init=False)
    """Why the result depends on the number of processes, apart from the cut."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.lengths is None:
            raise UserError(
                f"--max_tokens_per_micro_batch {self.max_tokens} needs the lengths of the samples, and this data set "
                "has none: use --per_device_train_batch_size"
            )
        if self.global_batch_size < self.num_processes:
            raise UserError(
                f"--global_batch_size {self.global_batch_size} is smaller than the number of processes, "
                f"{self.num_processes}: raise it to {self.num_processes} or more, or start fewer processes"
            )
        self.lengths = np.broadcast_to(1, self.num_samples) if self.lengths is None else np.asanyarray(self.lengths)
        self.num_samples = len(self.lengths)
        self._budget = Budget(self.max_tokens, self.max_samples, self.packed)
        if self.max_tokens is not None:
            longest = int(self.lengths.argmax()) if self.longest is None else self.longest
            if (length := int(self.lengths_of(np.array([longest]))[0])) > self.max_tokens:
                raise UserError(
                    f"--max_tokens_per_micro_batch {self.max_tokens} is smaller than sample {longest}, which has "
                    f"{length} tokens: raise it to {length} or more, or lower --max_length"
                )
        if self.max_steps is not None:
            self.total_samples = self.max_steps * self.global_batch_size
        else:
            assert self.num_epochs is not None
            self.total_samples = self.num_epochs * self.num_samples
        self.total_steps = -(-self.total_samples // self.global_batch_size)

    @classmethod
    def of_run(cls, config: Options, accelerator: Any, **data: Any) -> Self:
        """The plan of a recipe's config for this process; `TrainingRun.prepare` settles `equal_counts`.

        `data` are the arguments of `Plan` on the samples: `lengths` or `num_samples`, and what else is known of them.
        """
        return cls(
            **data,
            seed=config.seed,
            global_batch_size=config.global_batch_size,
            num_epochs=config.num_train_epochs,
            max_steps=config.max_train_steps,
            max_tokens=config.max_tokens,
            max_samples=config.per_device_train_batch_size,
            micro_batches_per_step=config.micro_batches_per_step or 1,
            num_processes=accelerator.num_processes,
            process_index=accelerator.process_index,
        )

    def evaluation(
        self, lengths: NDArray[np.integer], padded: Callable[[NDArray[Any]], NDArray[Any]] | None = None
    ) -> list[MicroBatch]:
        """This process's share of an evaluation pass, in micro-batches of twice the budget: no activations are kept.

        Args:
            lengths: int [n], tokens of each sample of the data that are evaluated.
            padded: see `Plan`.
        """
        twice = self.max_tokens and 2 * self.max_tokens, self.max_samples and 2 * self.max_samples
        budget = Budget(*twice, self.packed)
        taken = padded(np.asarray(lengths)) if padded else np.asarray(lengths)
        return evaluation_batches(taken, budget, self.num_processes, self.process_index, self.equal_counts)

    def lengths_of(self, samples: Ints) -> Ints:
        """int64 [n]: the tokens that `samples` [n] take, each padded on its own."""
        return self.padded(self.lengths[samples].astype(np.int64))

    def global_batch(self, step: int) -> tuple[Ints, Ints]:
        """The samples of a step: (sample ids, their epochs), each int64 [G], or fewer in the last step."""
        start, size = step * self.global_batch_size, self.num_samples
        end = min(start + self.global_batch_size, self.total_samples)
        parts = {
            epoch: permutation(self.seed, epoch, size, max(start - epoch * size, 0), min(end - epoch * size, size))
            for epoch in range(start // size, -(-end // size))
        }
        return np.concatenate([*parts.values()]), np.repeat([*parts], [*map(len, parts.values())])

    def epochs_completed(self, step: int) -> int:
        """How many epochs are complete after steps 0 ... step-1."""
        return min(step * self.global_batch_size, self.total_samples) // self.num_samples

    def due(self, every: int | None, step: int) -> bool:
        """Whether an action is due after step `step`: every `every` steps (None: every epoch), and after the last."""
        return step + 1 == self.total_steps or self.due_without_end(every, step)

    def due_without_end(self, every: int | None, step: int) -> bool:
        """Whether an action would be due after step `step` if the run were longer: see `due`."""
        if every is None:
            return self.epochs_completed(step + 1) > self.epochs_completed(step)
        return (step + 1) % every == 0

    def cut(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step for all processes, longest samples first."""
        return self._cut(step)[0]

    def _cut(self, step: int) -> tuple[list[MicroBatch], Ints]:
        """The micro-batches of a step for all processes, and the lengths of their samples."""
        samples, epochs = self.global_batch(step)
        lengths = self.lengths_of(samples)
        order = (-lengths).argsort(kind="stable")
        samples, epochs, lengths = samples[order], epochs[order], lengths[order]
        sorted_lengths = lengths.tolist()
        count = self._count(sorted_lengths, self.num_processes, self.first_processes)
        starts = cut_points(sorted_lengths, self._budget, count)
        size = len(samples) if self.weights is None else self.weights[samples].sum().item()
        return _micro_batches(step, samples, epochs, size, starts), lengths

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step for this process: see `micro_batches_of_all`."""
        return self.micro_batches_of_all(step)[self.process_index]

    def micro_batches_of_all(self, step: int) -> list[list[MicroBatch]]:
        """The micro-batches of a step for each process: at least one; the last one is marked."""
        shares = _shares(*self._cut(step), self.packed, self.num_processes, self.equal_counts, fewest=1)
        return [[*mine[:-1], replace(mine[-1], last=True)] for mine in shares]

    def cut_otherwise(self, start: int, num_processes: int, first_processes: int) -> bool:
        """Whether steps from `start` on have another cut on `num_processes`, of a run that began on `first_processes`.

        Of many steps, evenly spaced ones are compared.
        """
        steps = range(start, self.total_steps)
        fewest, fewest_here = max(num_processes, first_processes), max(self.num_processes, self.first_processes)
        if not steps or (fewest == fewest_here and not self.equal_counts):
            return False
        most = max(2, COMPARED // self.global_batch_size)

        def differs(step: int) -> bool:
            lengths = sorted(self.lengths_of(self.global_batch(step)[0]).tolist(), reverse=True)
            here = self._count(lengths, self.num_processes, self.first_processes)
            return here != self._count(lengths, num_processes, first_processes)

        return any(map(differs, {steps[i * (len(steps) - 1) // (most - 1)] for i in range(most)}))

    def _count(self, sorted_lengths: list[int], num_processes: int, first_processes: int) -> int:
        """The number of micro-batches of a step: as the config requires, and enough for every process.

        A last step with fewer samples is not cut for the processes: they idle once, and the config alone cuts it.
        """
        rows = len(sorted_lengths)
        count = self._budget.count(sorted_lengths, self.micro_batches_per_step)
        if rows == self.global_batch_size:
            count = max(count, first_processes, num_processes)
            if self.equal_counts:
                count = -(-count // num_processes) * num_processes
        return min(count, rows)


def evaluation_batches(
    lengths: Ints,
    budget: Budget,
    num_processes: int = 1,
    process_index: int = 0,
    equal_counts: bool = False,
) -> list[MicroBatch]:
    """One process's share of one pass over a data set, longest samples first.

    Each sample is in exactly one counted micro-batch of one process. With `equal_counts`, for models whose forward pass
    communicates, repeats that are not counted give every process the same number of micro-batches.
    """
    lengths = lengths.astype(np.int64)
    order = np.argsort(-lengths, kind="stable")
    lengths = lengths[order]
    sorted_lengths = lengths.tolist()
    starts = budget.fill(sorted_lengths, budget.area(sorted_lengths))
    if len(starts) < num_processes:
        starts = cut_points(sorted_lengths, budget, min(num_processes, len(order)))
    pieces = _micro_batches(0, order, np.zeros(len(order), np.int64), len(order), starts)
    return _shares(pieces, lengths, budget.packed, num_processes, equal_counts)[process_index]


def _micro_batches(step: int, samples: Ints, epochs: Ints, size: float, starts: list[int]) -> list[MicroBatch]:
    """The micro-batches of a step that begin at `starts` in `samples`."""
    return [
        MicroBatch(step, index, samples[start:end], epochs[start:end], size, start=start, step_samples=len(samples))
        for index, (start, end) in enumerate(zip(starts, [*starts[1:], len(samples)], strict=True))
    ]


def _shares(
    pieces: list[MicroBatch], lengths: Ints, packed: bool, num_processes: int, equal_counts: bool, fewest: int = 0
) -> list[list[MicroBatch]]:
    """The pieces of each process, and repeats if it has fewer than `fewest`, or than others with `equal_counts`."""
    if equal_counts:
        fewest = -(-len(pieces) // num_processes)
    last = pieces[-1]
    # Two samples, because batch norm does not accept one row.
    repeat = replace(last, index=len(pieces), samples=last.samples[-2:], epochs=last.epochs[-2:], counted=False)
    costs = costs_of(lengths, [piece.start for piece in pieces], packed)
    indices = share(costs, num_processes, equal_counts)
    return [[pieces[i] for i in mine] + [repeat] * (fewest - len(mine)) for mine in indices]
