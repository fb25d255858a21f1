"""Loads the micro-batches of the plan: worker processes, collation, the copy to the device.

Any map-style dataset (`__len__`, `__getitem__`) with any `collate_fn` works. Before each `__getitem__`, `random`, NumPy
and torch are seeded from (seed, epoch, sample), and before `collate_fn` from (seed, step, micro-batch), so usual code
of augmentation and masking draws the same numbers in every process. A dataset or `collate_fn` without randomness sets
`draws_random = False`, which saves 20 microseconds per call. A dataset that reads a whole micro-batch in one call has
`read_micro_batch(samples, epochs)`, whose result goes to `collate_fn`; its random numbers must be functions of its
arguments. A dataset on another machine may have `read_ahead(schedule)`: it takes the micro-batches of `schedule` in
advance, begins to read them, and yields them. None means that the data are here.
"""

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from hashlib import blake2b
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply, send_to_device
from torch.utils.data import DataLoader, Dataset, TensorDataset

from shared.errors import UserError
from shared.plan.batches import MicroBatch, Plan
from shared.plan.draws import seed_micro_batch, seed_sample
from shared.processes.signals import ignore_in_child

FAR_AHEAD = 16  # micro-batches that each worker reads ahead from another machine


class Loader:
    """Loads the micro-batches of one process, in the order of the plan.

    Args:
        dataset: `__len__` and `__getitem__`.
        plan: the samples of each micro-batch, see `shared.plan.batches`.
        collate_fn: list of samples -> batch of tensors.
        device: the device of the batches.
        num_workers: processes that read and collate ahead; 0 reads in the training process. None: 2 if `device` is an
            accelerator, 0 on a CPU, whose cores are busy with training.

    Raises:
        UserError: the plan has another number of samples than the data set.
    """

    def __init__(
        self,
        dataset: Dataset,
        plan: Plan,
        collate_fn: Callable[[list[Any]], Any],
        device: torch.device,
        num_workers: int | None = None,
    ) -> None:
        if (size := len(dataset)) != plan.num_samples:  # type: ignore[arg-type]  # it has a length
            raise UserError(
                f"the data set has {size:,} samples, and its plan {plan.num_samples:,}: give the plan the lengths or "
                "the number of the samples to train on"
            )
        self.plan = plan
        self.seconds_waited = 0.0  # waiting for data since the start
        self.num_workers = num_workers
        self._feed: Callable[..., Generator[tuple[MicroBatch, Any]]] = partial(
            feed, dataset=dataset, collate_fn=collate_fn, device=device, num_workers=num_workers, seed=plan.seed
        )
        self._stream = self._feed([])
        self._next_step = -1

    def one(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        """A micro-batch and its batch on the device, read in this process, regardless of the order of training."""
        return next(self._feed([micro_batch], num_workers=0))

    def micro_batches(self, step: int) -> Iterator[tuple[MicroBatch, Any]]:
        """This process's micro-batches of a step, each with its collated batch on the device.

        Steps are read ahead in order. A request for any step but the next one restarts the reading at that step.
        """
        if step != self._next_step:
            plan = self.plan  # not self: a reference cycle delays the end of the workers by 10 s each
            schedule = (m for s in range(step, plan.total_steps) for m in plan.micro_batches(s))
            self._stream = self._feed(schedule)
        self._next_step = -1  # a caller that leaves the loop early gets a new stream next time
        while True:
            started = time.perf_counter()
            micro_batch, batch = next(self._stream)
            self.seconds_waited += time.perf_counter() - started
            yield micro_batch, batch
            if micro_batch.last:
                break
        self._next_step = step + 1

    def close(self) -> None:
        """End the workers, which would otherwise run until Python collects the loader."""
        self._stream.close()


def feed(
    schedule: Iterable[MicroBatch],
    dataset: Dataset,
    collate_fn: Callable[[list[Any]], Any],
    device: torch.device,
    num_workers: int | None = 0,
    seed: int = 0,
) -> Generator[tuple[MicroBatch, Any]]:
    """Read, collate and move to `device` the samples of each micro-batch of `schedule`, in its order.

    The workers end with the generator. `num_workers` None: see `Loader`.
    """
    if num_workers is None:
        num_workers = 0 if device.type == "cpu" else 2
    reader = _Reader(dataset, collate_fn, seed)
    pin = device.type == "cuda"
    read_ahead = getattr(dataset, "read_ahead", None)
    batches: Iterable[tuple[MicroBatch, Any]]
    end_workers: Callable[[], object] = nullcontext
    if num_workers:
        batches, end_workers = _start_workers(
            DataLoader(
                reader,  # type: ignore[arg-type]  # it takes a micro-batch
                batch_sampler=schedule,  # type: ignore[arg-type]
                collate_fn=tuple,  # what the reader returns, a tuple, as it is
                num_workers=num_workers,
                prefetch_factor=FAR_AHEAD if read_ahead else 4,
                pin_memory=pin,
                worker_init_fn=ignore_in_child,
            )
        )
    else:
        if read_ahead:
            schedule = read_ahead(schedule)
        batches = (reader.__getitems__(micro_batch) for micro_batch in schedule)
    try:
        for micro_batch, batch in batches:
            seed_micro_batch(seed, micro_batch.step, micro_batch.index)  # workers have collated it elsewhere
            if device.type == "cpu":
                yield micro_batch, batch
            else:  # the copy from pinned memory is asynchronous
                pinned = recursively_apply(torch.Tensor.pin_memory, batch) if pin and not num_workers else batch
                yield micro_batch, send_to_device(pinned, device, non_blocking=pin)
    except UserError as error:  # the DataLoader adds a traceback to the message of a worker's
        raise UserError(str(error).strip().splitlines()[-1].removeprefix("shared.errors.UserError: ")) from None
    finally:
        end_workers()


class _Reader:
    """The dataset of the workers: it takes a micro-batch, and returns it with its batch: ids and content together."""

    def __init__(self, dataset: Dataset, collate_fn: Callable[[list[Any]], Any], seed: int) -> None:
        self.dataset, self.collate_fn, self.seed = dataset, collate_fn, seed
        self.draws_random = getattr(dataset, "draws_random", True)
        self.collating_draws = vars(type(collate_fn)).get("draws_random", True)  # a subclass may draw

    def __getitems__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, Any]:
        rows = self._read(micro_batch)
        if self.collating_draws:
            seed_micro_batch(self.seed, micro_batch.step, micro_batch.index)
        return micro_batch, self.collate_fn(rows)

    def _read(self, micro_batch: MicroBatch) -> list[Any]:
        if hasattr(self.dataset, "read_micro_batch"):
            return self.dataset.read_micro_batch(micro_batch.samples, micro_batch.epochs)
        rows = []
        for sample, epoch in zip(micro_batch.samples.tolist(), micro_batch.epochs.tolist(), strict=True):
            if self.draws_random:
                seed_sample(self.seed, epoch, sample)
            rows.append(self.dataset[sample])
        return rows


def _start_workers(loader: DataLoader[Any]) -> tuple[Iterator[Any], Callable[[], object]]:
    """Start the worker processes; return their batches, and a function that kills the workers.

    When this process exits, it calls that function, and leaves its other children alone.
    """
    before = set(active_children())
    batches: Iterator[Any] = iter(())
    try:
        batches = iter(loader)
    finally:
        end_workers = Finalize(None, _kill, (set(active_children()) - before,), exitpriority=0)
    return batches, end_workers


def _kill(workers: set[BaseProcess]) -> None:
    """Kill the workers that still run: they ignore SIGTERM, and a process that exits waits for its children."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread:  # torch's handler raises an error if a worker is killed
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    running = workers.intersection(active_children())
    for worker in running:
        worker.kill()
    for worker in running:
        worker.join()
    if in_main_thread:
        signal.signal(signal.SIGCHLD, before)


class InMemory(TensorDataset):
    """Tensors [N, ...]; item i of each tensor belongs to sample i."""

    draws_random = False

    def __init_subclass__(cls) -> None:
        """A subclass that reads its samples itself may draw random numbers, unless it says otherwise."""
        cls.draws_random = cls.__dict__.get("draws_random", cls.draws_random or "__getitem__" in cls.__dict__)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N], all 1: samples have equal cost. They take no memory."""
        return np.broadcast_to(np.int64(1), len(self))

    def digest(self) -> str:
        """A digest of the content, which a resumed run compares with that of the interrupted run."""
        content = blake2b(digest_size=16)
        for tensor in self.tensors:
            content.update(f"{tensor.dtype}{[*tensor.shape]}".encode())
            content.update(np.ascontiguousarray(tensor.numpy(force=True)).view(np.uint8).data)
        return content.hexdigest()
