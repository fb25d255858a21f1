"""Run two training loops in the same processes, in turns: one makes an optimizer step, then the other.

A disturbance of the machine then hits both loops, whether it takes a tenth of a second or a minute. The ratio of the
two loops is known to a few thousandths; with launches in turns it is known to a few hundredths.
"""

import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.harness import launching


class LastStepDone(Exception):
    """Raised from the optimizer's hook after the last step; it ends any loop."""


class Baton:
    """Lets one of two threads run at a time."""

    def __init__(self, names: Sequence[str], first: str) -> None:
        self.names, self.holder, self.ended = names, first, False
        self.changed = threading.Condition()

    def wait(self, me: str) -> None:
        """Return when the other thread has passed the baton or ended."""
        with self.changed:
            self.changed.wait_for(lambda: self.holder == me or self.ended)

    def pass_on(self, me: str, ended: bool = False) -> None:
        """Let the other thread run; `ended`: this one needs no more turns."""
        with self.changed:
            self.holder = next(name for name in self.names if name != me)
            self.ended |= ended
            self.changed.notify_all()


class Loop:
    """A training loop that waits after each optimizer step until the other loop has made the same step."""

    def __init__(self, name: str, call: Callable[[], None], steps: int, baton: Baton) -> None:
        self.name, self.call, self.steps, self.baton = name, call, steps, baton
        self.seconds: list[float] = []  # of each step; the first one includes the start
        self.weights: list[Tensor] = []  # after the last step
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Run the loop from its start to its last step."""
        self.baton.wait(self.name)
        self.thread, self.resumed = threading.get_ident(), time.perf_counter()
        handle = register_optimizer_step_post_hook(self._after_step)
        try:
            self.call()
        except LastStepDone:
            pass
        except BaseException as error:
            self.failure = error
        finally:
            handle.remove()
            self.baton.pass_on(self.name, ended=True)

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if threading.get_ident() != self.thread:
            return
        self.seconds.append(time.perf_counter() - self.resumed)
        if len(self.seconds) == self.steps:
            self.weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
            raise LastStepDone
        self.baton.pass_on(self.name)
        self.baton.wait(self.name)
        self.resumed = time.perf_counter()


def race(calls: Mapping[str, Callable[[], None]], steps: int, first: str) -> dict[str, Loop]:
    """Run two loops for `steps` steps each.

    Args:
        calls: the loops by name; this thread, which should be the main one, runs the first of them.
        steps: optimizer steps of each loop.
        first: name of the loop that makes the first step.

    Raises:
        Exception: the error of a loop that failed.
    """
    baton = Baton([*calls], first)
    loops = {name: Loop(name, call, steps, baton) for name, call in calls.items()}
    mine, other = loops.values()
    beside = threading.Thread(target=other.run, daemon=True)
    beside.start()
    mine.run()
    beside.join()
    for loop in loops.values():
        if loop.failure:
            raise loop.failure
        assert len(loop.seconds) == steps, f"{loop.name} ended after {len(loop.seconds)} steps"
    return loops


def ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """The median over the steps of `seconds` divided by `others`."""
    return statistics.median(mine / theirs for mine, theirs in zip(seconds, others, strict=True))


def rows_of(script: str, processes: int, folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Start `script --job FILE` in `processes` processes, which `serve` the job; return the rows that they found."""
    # With glibc's default the second thread gets an arena of its own, whose memory is unlike the main thread's.
    os.environ["MALLOC_ARENA_MAX"] = "1"
    file = folder / "loops.job"
    file.write_text(json.dumps(job))
    launching.launch(processes, folder / "log", script, "--job", file)
    return json.loads(file.with_suffix(".rows").read_text())


def serve(file: Path, work: Callable[[SimpleNamespace], list[dict[str, Any]]]) -> NoReturn:
    """Do the job in `file` as one process of a launch; the main process writes the rows for `rows_of`."""
    dist.init_process_group("gloo")
    rows = work(SimpleNamespace(**json.loads(file.read_text())))
    if dist.get_rank() == 0:
        file.with_suffix(".rows").write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)
