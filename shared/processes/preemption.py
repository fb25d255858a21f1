"""All processes agree that one of them was signalled: in training, and between the batches of an evaluation.

A decision that one process took alone would leave the others waiting in their next collective call.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from shared.compat import of_torch
from shared.errors import Preempted
from shared.processes import patience
from shared.processes.patience import PROCESS_GROUP_TIMEOUT
from shared.processes.signals import heard, write_marker

LOOK_EVERY = 0.2  # seconds between looks at what the other processes say, during an evaluation
CUT_SHORT = "accelerate-recipes/cut-short"  # a key in the group's store
Batch = TypeVar("Batch")


class Preemption:
    """Whether the training loop is to save and end. Constructed on all processes.

    Args:
        accelerator: gives the number of processes.
        output_dir: folder of the run, where the marker is left.
    """

    def __init__(self, accelerator: Any, output_dir: str) -> None:
        self._accelerator, self._output_dir = accelerator, Path(output_dir)
        self._group: Any = None
        self._pending: tuple[Any, Tensor] | None = None
        if accelerator.num_processes > 1:
            self._group = dist.new_group(backend="gloo", timeout=PROCESS_GROUP_TIMEOUT)

    def exchange_signals(self) -> bool:
        """Whether some process was signalled, the same answer on all; every process calls this once per step.

        A signal that comes during one step is answered after the next: the maximum over processes is read a step later
        than it was asked for, so that no step waits for it. One process knows at once, and all do after an evaluation
        that was cut short. Before the first call there is nothing to save: a signal has ended the process by itself.
        """
        heard.something_to_save = True
        if self._group is None:
            return bool(heard.signal)
        answer = heard.cut_short
        if self._pending:
            work, flag = self._pending
            work.wait()
            answer = answer or bool(flag)
        flag = torch.tensor(int(heard.signal > 0))
        self._pending = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True), flag
        return answer

    def end_run(self, step: int, saver: Any, tracker: Any, monitor: Any) -> NoReturn:
        """End the run once its checkpoint of `step`, under way, is complete; every process calls this.

        What a profile has found so far is written after that.

        Raises:
            Preempted: always, or
            UserError: the checkpoint could not be saved.
        """
        saver.finish()
        received: list[int] = [heard.signal] * self._accelerator.num_processes
        if self._group is not None:
            dist.all_gather_object(received, heard.signal, group=self._group)
        if self._accelerator.is_main_process:
            write_marker(self._output_dir, step, {rank: number for rank, number in enumerate(received) if number})
            print(f"interrupted at step {step}: checkpoint saved, start again to go on", flush=True)
        monitor.close()
        tracker.close()  # last, because an upload may outlast what the scheduler allows
        patience.for_all(self._accelerator)  # the launcher ends the others as soon as one has left
        raise Preempted

    def all_saved(self) -> None:
        """From here on, the loop over and its last checkpoint written, a signal ends each process at once.

        Raises:
            Preempted: one has come already.
        """
        heard.something_to_save = False
        if heard.signal:
            heard.mark()
            raise Preempted


def watch(accelerator: Any, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Pass on the batches of an evaluation until some process has been signalled; `cut_short` then says so.

    Processes have different numbers of batches, so there is no collective call: one that was signalled says so in the
    group's store. Under FSDP the numbers are equal, each forward pass waits for all, and so all have to stop at once.
    """
    heard.cut_short = False
    looked = time.monotonic()
    for batch in batches:
        stop = heard.signal > 0
        if accelerator.is_fsdp2:
            stop = on_any(accelerator, stop)
        elif accelerator.num_processes > 1 and (stop or time.monotonic() - looked >= LOOK_EVERY):
            looked = time.monotonic()
            store = of_torch.default_store()
            if stop:
                store.set(CUT_SHORT, "1")
            stop = stop or store.check([CUT_SHORT])
        if stop:
            heard.cut_short = True
            return
        yield batch


def cut_short(accelerator: Any) -> bool:
    """Whether the evaluation just watched is incomplete on some process, the same answer on all; all call it."""
    heard.cut_short = on_any(accelerator, heard.cut_short)
    return heard.cut_short


def on_any(accelerator: Any, flag: bool) -> bool:
    """Whether `flag` is set on some process; all call it."""
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), reduction="sum") > 0)
