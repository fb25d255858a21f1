"""Let all processes know that one of them received a signal: during training, and between batches of an evaluation.

If one process stopped alone, the others would wait for it in their next collective call.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from shared.compat import of_torch
from shared.errors import Preempted
from shared.processes import barrier
from shared.processes.barrier import PROCESS_GROUP_TIMEOUT
from shared.processes.collectives import gather
from shared.processes.signals import heard, write_marker

CHECK_INTERVAL = 0.2  # seconds between checks of the store, during an evaluation
CUT_SHORT = "accelerate-recipes/cut-short"  # a key in the group's store
Batch = TypeVar("Batch")


class Exchange:
    """Tells all processes of a gloo `group` whether one of them received a signal; None: a process that is alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._pending: tuple[Any, Tensor] | None = None

    def __call__(self) -> bool:
        """Return the same on all processes; each of them calls this equally often.

        The maximum over processes is requested in one call and read in the next, so that nothing waits for it: a signal
        takes effect one call later. A process that is alone notices a signal immediately.
        """
        if self._group is None:
            return bool(heard.signal)
        answer = self.finish()
        flag = torch.tensor(int(heard.signal > 0))
        self._pending = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True), flag
        return answer

    def finish(self) -> bool:
        """Wait for the last request, and return its result."""
        if self._pending is None:
            return False
        work, flag = self._pending
        work.wait()
        self._pending = None
        return bool(flag)


class Preemption:
    """Tells the training loop whether to save and end. Every process must construct it.

    Args:
        accelerator: knows the number of processes.
        output_dir: folder of the run, in which the marker file is written.
    """

    def __init__(self, accelerator: Any, output_dir: str) -> None:
        self._accelerator, self._output_dir = accelerator, Path(output_dir)
        self._group: Any = None
        if accelerator.num_processes > 1:
            self._group = dist.new_group(backend="gloo", timeout=PROCESS_GROUP_TIMEOUT)
        self._exchange = Exchange(self._group)

    def exchange_signals(self) -> bool:
        """Return whether some process received a signal, the same on all; every process calls this once per step.

        A signal takes effect one step later. There is no such delay with a single process, or after an evaluation that
        was cut short. Before the first call there is nothing to save, and a signal ends its process immediately.
        """
        heard.something_to_save = True
        return self._exchange() or heard.cut_short  # every process takes part in the exchange

    def end_run(self, step: int, saver: Any, close: Callable[[], object]) -> NoReturn:
        """Wait for the checkpoint of `step` to be complete, then end the run; every process calls this.

        `close` is called after the checkpoint, because an upload may take longer than the scheduler allows.

        Raises:
            Preempted: in every other case.
            UserError: the checkpoint could not be saved.
        """
        saver.finish()
        received: list[int] = [heard.signal] * self._accelerator.num_processes
        if self._group is not None:
            dist.all_gather_object(received, heard.signal, group=self._group)
        if self._accelerator.is_main_process:
            write_marker(self._output_dir, step, {rank: number for rank, number in enumerate(received) if number})
            print(f"interrupted at step {step}: checkpoint saved, start again to resume", flush=True)
        close()
        barrier.wait_for_all(self._accelerator)  # the launcher ends all processes after the first exit
        raise Preempted

    def all_saved(self) -> None:
        """Let signals end each process immediately from now on; call it when the last checkpoint is written.

        Raises:
            Preempted: this process has already received a signal.
        """
        heard.something_to_save = False
        if heard.signal:
            heard.mark()
            raise Preempted


def watch(accelerator: Any, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches of an evaluation until some process receives a signal; `cut_short` then returns True.

    Processes have different numbers of batches, so a collective call is not possible: a process that receives a signal
    sets a key in the group's store. Under FSDP all processes have the same number of batches, each forward pass waits
    for all of them, and so all must stop at the same batch. They exchange signals over gloo, one batch behind, so that
    none waits for its GPU.
    """
    heard.cut_short = False
    checked = time.monotonic()
    exchange = Exchange(barrier.group_of_all(accelerator)) if accelerator.is_fsdp2 else None
    for batch in batches:
        stop = heard.signal > 0
        if exchange:
            stop = exchange()
        elif accelerator.num_processes > 1 and (stop or time.monotonic() - checked >= CHECK_INTERVAL):
            checked = time.monotonic()
            store = of_torch.default_store()
            if stop:
                store.set(CUT_SHORT, "1")
            stop = stop or store.check([CUT_SHORT])
        if stop:
            heard.cut_short = True
            break
        yield batch
    if exchange:
        exchange.finish()


def cut_short(accelerator: Any) -> bool:
    """Return whether the last evaluation is incomplete on some process, the same on all; every process calls this.

    It waits for processes with more batches for as long as they send heartbeats.
    """
    heard.cut_short = any(gather(accelerator, heard.cut_short))
    return heard.cut_short
