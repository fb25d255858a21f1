"""Two training loops in the same processes, step by step: first one makes an optimizer step, then the other.

What disturbs a machine for a tenth of a second or for a minute then disturbs both alike, and the ratio of two loops is
known to some thousandths where launches that take turns leave it at some hundredths.
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

import peers
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook


class Enough(Exception):
    """The last step of a loop is done: raised out of it, whatever loop it is."""


class Baton:
    """Lets one of two threads run at a time."""

    def __init__(self, names: Sequence[str], first: str) -> None:
        self.names, self.holder, self.ended = names, first, False
        self.changed = threading.Condition()

    def wait(self, me: str) -> None:
        """Go on once the other one has passed the baton, or ended."""
        with self.changed:
            self.changed.wait_for(lambda: self.holder == me or self.ended)

    def pass_on(self, me: str, ended: bool = False) -> None:
        """Have the other one go on; `ended`: for good."""
        with self.changed:
            self.holder = next(name for name in self.names if name != me)
            self.ended |= ended
            self.changed.notify_all()


class Loop:
    """A training loop that stands still after each optimizer step until the other one has made the same step."""

    def __init__(self, name: str, call: Callable[[], None], steps: int, baton: Baton) -> None:
        self.name, self.call, self.steps, self.baton = name, call, steps, baton
        self.seconds: list[float] = []  # of each step; the start is in the first
        self.weights: list[Tensor] = []  # after the last one
        self.failure: BaseException | None = None

    def run(self) -> None:
        """From the start to the last step."""
        self.baton.wait(self.name)
        self.thread, self.resumed = threading.get_ident(), time.perf_counter()
        handle = register_optimizer_step_post_hook(self._after_step)
        try:
            self.call()
        except Enough:
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
            raise Enough
        self.baton.pass_on(self.name)
        self.baton.wait(self.name)
        self.resumed = time.perf_counter()


def race(calls: Mapping[str, Callable[[], None]], steps: int, first: str) -> dict[str, Loop]:
    """Run two loops for so many steps; the first of `calls` in this thread, which should be the main one.

    Raises:
        Exception: what a loop has failed with.
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
    """The median over the steps of one's time over that of the other."""
    return statistics.median(mine / theirs for mine, theirs in zip(seconds, others, strict=True))


def rows_of(script: str, processes: int, folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Start `script --job FILE` in so many processes, which `serve` the job in the file; the rows they found."""
    os.environ["MALLOC_ARENA_MAX"] = "1"  # with glibc's default, a thread has memory of another kind than the main one
    file = folder / "in_step.job"
    file.write_text(json.dumps(job))
    peers.launch(processes, folder / "log", script, "--job", file)
    return json.loads(file.with_suffix(".rows").read_text())


def serve(file: Path, work: Callable[[SimpleNamespace], list[dict[str, Any]]]) -> NoReturn:
    """Do the job in `file`, in one process of a launch; the main one leaves the rows for `rows_of`."""
    dist.init_process_group("gloo")
    rows = work(SimpleNamespace(**json.loads(file.read_text())))
    if dist.get_rank() == 0:
        file.with_suffix(".rows").write_text(json.dumps(rows))
    dist.barrier()
    os._exit(0)
