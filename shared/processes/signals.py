"""Handling of SIGTERM, SIGINT, SIGUSR1 and SIGHUP, and the marker file that an interrupted run leaves.

While there is nothing to save, a signal ends the process immediately. During training the signal is only recorded, and
all processes learn that one of them received it, also between batches of an evaluation: if one process stopped alone,
the others would wait for it in their next collective call. The exit code is 143 in both cases.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from torch import distributed as dist

from shared.compat import of_torch
from shared.disk import replace_file
from shared.errors import Preempted
from shared.processes.collectives import gather, group_of_all

EXIT_FAILED = 1
EXIT_PREEMPTED = 143
MARKER = "PREEMPTED"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE")  # users do not set these
SAME_SIGNAL = 5.0  # seconds in which a launcher may forward a signal that the scheduler sent to all processes
CHECK_INTERVAL = 0.2  # seconds between checks of the store, during an evaluation
CUT_SHORT = "accelerate-recipes/cut-short"  # a key in the group's store
Batch = TypeVar("Batch")


class Heard:
    """The signal that this process received, if any. Each process has one instance: `heard`."""

    def __init__(self) -> None:
        self.signal = 0  # number of the first signal; 0: none
        self.first = 0.0  # when it came, on the monotonic clock
        self.cut_short = False  # whether a signal ended the last evaluation: on this process, then on any
        self.something_to_save = False  # set by the training loop, which then ends the run itself
        self.output_dir: Path | None = None  # for the marker; None in a dry run, which writes none
        self.removing = threading.Lock()  # held while an old marker is removed, and by a process that ends immediately
        self.peer_failed: Callable[[], bool] = lambda: False  # whether the launcher sent the signal because of it

    def hear(self, number: int, now: float) -> int | None:
        """Record a signal received at `now`; return the exit code if it ends this process immediately."""
        if self.peer_failed():
            return EXIT_FAILED  # not a preemption; a step that waits for the failed process never ends
        if not self.signal:
            self.signal, self.first = number, now
            if not self.something_to_save:
                self.removing.acquire()
                self.mark()
                return EXIT_PREEMPTED
        return EXIT_PREEMPTED if now - self.first > SAME_SIGNAL else None

    def mark(self) -> None:
        """Write the marker of a process that ends with nothing to save, and print a line."""
        if self.output_dir:
            write_marker(self.output_dir, None, {int(os.environ.get("RANK", 0)): self.signal})
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print("interrupted with nothing to save: start again to resume", file=sys.stderr, flush=True)


heard = Heard()


def listen(output_dir: str | None, leave: Callable[[int], object], peer_failed: Callable[[], bool]) -> None:
    """Start handling signals; a separate thread calls `leave(code)` when one ends the process immediately.

    Python runs signal handlers in the main thread, which may be in a collective call for minutes; so a separate thread
    reads the signals. Forked children have the default handlers. SIGHUP, which a closed terminal sends, stays ignored
    under nohup.
    """
    heard.output_dir, heard.peer_failed = Path(output_dir) if output_dir else None, peer_failed
    incoming, outgoing = os.pipe()
    os.set_blocking(outgoing, False)
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def read() -> None:
        while numbers := os.read(incoming, 64):
            for number in numbers:  # may include other signals that have a handler
                if number == signal.SIGHUP:
                    redirect_if_closed(terminals)
                if number in SIGNALS and (code := heard.hear(number, time.monotonic())) is not None:
                    leave(code)

    threading.Thread(target=read, name="signals", daemon=True).start()
    signal.set_wakeup_fd(outgoing, warn_on_full_buffer=False)
    for number in handled_signals():
        signal.signal(number, lambda *_: None)  # with any handler, the interpreter writes the number to the pipe
    # Until its handlers are reset, a child would write its signals to this process's pipe.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS),
        after_in_child=stop_listening,
    )


def stop_listening() -> None:
    """Restore the default signal handlers, also in a forked child, in which signals are blocked."""
    signal.set_wakeup_fd(-1)
    for number in handled_signals():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def handled_signals() -> list[signal.Signals]:
    """SIGNALS, without SIGHUP if it is ignored. SIGINT is handled even if a shell ignores it for a background job."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]


def redirect_if_closed(terminals: list[int]) -> None:
    """Redirect to /dev/null those of these streams whose terminal is closed: writing to it would raise an error."""
    for stream in terminals:
        if not os.isatty(stream):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)


def ignore_in_child(*_: object) -> None:
    """In a process that multiprocessing started: ignore signals, which the parent handles, and end with the parent.

    Ctrl-C and some schedulers signal the whole process group.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)  # the parent ended before the call to prctl


def die_with_launcher() -> None:
    """Receive SIGTERM when the launcher dies; end immediately if it is already dead.

    Otherwise the workers of a killed torchrun would keep training, and so would the single process of a killed
    `accelerate launch`, which forwards no signals. The kernel does not report a death before this call.
    """
    if not any(name in os.environ for name in SET_BY_LAUNCHERS):
        return
    die_with_parent(signal.SIGTERM)
    if not launcher_lives():
        print("the launcher of this process has ended: start again", file=sys.stderr, flush=True)
        os._exit(EXIT_PREEMPTED)


def launcher_lives() -> bool:
    """Whether an ancestor runs Python, as launchers do. A shell may be in between; init, not Python, adopts orphans."""
    try:
        above = [" ".join(process.cmdline()) for process in psutil.Process().parents()]
    except psutil.Error:  # a process of another user, or one that has just ended, which the kernel reports
        return True
    return any(word in command for command in above for word in ("python", "torchrun", "accelerate"))


def die_with_parent(number: int) -> None:
    """Ask the kernel to send signal `number` to this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def write_marker(output_dir: Path, step: int | None, received: Mapping[int, int]) -> None:
    """Write PREEMPTED to the output folder: JSON with the saved step (null: none), the time and each rank's signal."""
    content = {
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "signals": {str(rank): signal.Signals(number).name for rank, number in received.items()},
    }
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        replace_file(output_dir / MARKER, json.dumps(content) + "\n")
    except OSError as error:  # the run ends anyway
        print(f"{output_dir / MARKER} could not be written ({error}): the run ends anyway", file=sys.stderr)


class Exchange:
    """Tells all processes whether one of them received a signal. Every process must construct it; this is a barrier."""

    def __init__(self, accelerator: Any) -> None:
        self._group = group_of_all(accelerator)
        self._request, self._flag = None, torch.tensor(0)

    def __call__(self) -> bool:
        """Return the same on all processes; each of them calls this equally often.

        The maximum over processes is requested in one call and read in the next, so that nothing waits for it: a signal
        takes effect one call later. A process that is alone notices a signal immediately.
        """
        if self._group is None:
            return bool(heard.signal)
        answer = self.finish()
        self._flag = torch.tensor(int(heard.signal > 0))
        self._request = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return answer

    def finish(self) -> bool:
        """Wait for the last request, and return its result."""
        if self._request:
            self._request.wait()
        return bool(self._flag)


def must_end(exchange: Exchange) -> bool:
    """Return whether some process received a signal, the same on all; every process calls this once per step.

    A signal takes effect one step later. There is no such delay with a single process, or after an evaluation that was
    cut short. Before the first call there is nothing to save, and a signal ends its process immediately.
    """
    heard.something_to_save = True
    return exchange() or heard.cut_short  # every process takes part in the exchange


def mark_saved(accelerator: Any, output_dir: str, step: int) -> None:
    """Write the marker of a run whose checkpoint of `step` is complete, and print a line; every process calls this."""
    received = gather(accelerator, heard.signal)
    if accelerator.is_main_process:
        write_marker(Path(output_dir), step, {rank: number for rank, number in enumerate(received) if number})
        print(f"interrupted at step {step}: checkpoint saved, start again to resume", flush=True)


def all_saved() -> None:
    """Let signals end each process immediately from now on; call it when the last checkpoint is written.

    Raises:
        Preempted: this process has already received a signal.
    """
    heard.something_to_save = False
    if heard.signal:
        heard.mark()
        raise Preempted


def watch(accelerator: Any, batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches of an evaluation until some process receives a signal; all then have `heard.cut_short`.

    Every process calls this, and goes on to the end. There it waits for those with more batches, for as long as they
    send heartbeats.

    Processes have different numbers of batches, so a collective call is not possible: a process that receives a signal
    sets a key in the group's store. Under FSDP all processes have the same number of batches, each forward pass waits
    for all of them, and so all must stop at the same batch. They exchange signals over gloo, one batch behind, so that
    none waits for its GPU.
    """
    heard.cut_short = False
    checked = time.monotonic()
    exchange = Exchange(accelerator) if accelerator.is_fsdp2 else None
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
    heard.cut_short = any(gather(accelerator, heard.cut_short))
