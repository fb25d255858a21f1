"""What the outside tells a process: SIGTERM, SIGINT, SIGUSR1, SIGHUP, who may ignore them, and the marker they leave.

While there is nothing to save, a signal ends the process at once. In training it is only noted, and the loop asks
`shared.processes.preemption`, which brings all processes to the same answer. The exit code is 143 either way.
"""

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import psutil

EXIT_FAILED = 1
EXIT_PREEMPTED = 143
MARKER = "PREEMPTED"
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SET_BY_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_DYNAMO_MODE")  # and by no user
SAME_SIGNAL = 5.0  # seconds in which launchers pass on what the scheduler has sent to everybody already


class Heard:
    """The signal that this process got, if any. There is one of these in a process: `heard`."""

    def __init__(self) -> None:
        self.signal = 0  # number of the first one
        self.first = 0.0  # when it came, on the monotonic clock
        self.cut_short = False  # whether an evaluation was left for it: this process's answer, then everybody's
        self.something_to_save = False  # set by the training loop, which then sees to the end itself
        self.output_dir: Path | None = None  # for the marker; None in a dry run, which leaves nothing
        self.peer_failed: Callable[[], bool] = lambda: False  # whether the signal is only the launcher clearing up

    def hear(self, number: int, now: float) -> int | None:
        """Take in a signal that came at `now`; the exit code if it ends this process at once."""
        if self.peer_failed():
            return EXIT_FAILED  # nobody was preempted, and a step that waits for that process never ends
        if not self.signal:
            self.signal, self.first = number, now
            if not self.something_to_save:
                self.mark()
                return EXIT_PREEMPTED
        return EXIT_PREEMPTED if now - self.first > SAME_SIGNAL else None

    def mark(self) -> None:
        """Leave the marker of a process that ends where there is nothing to save."""
        rank = int(os.environ.get("RANK", 0))
        if self.output_dir:
            write_marker(self.output_dir, None, {rank: self.signal})
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            print("interrupted with nothing to save: start again to go on", file=sys.stderr, flush=True)


heard = Heard()


def listen(output_dir: str | None, leave: Callable[[int], object], peer_failed: Callable[[], bool]) -> None:
    """Hear signals from now on; `leave(code)` is called, in another thread, where one ends the process at once.

    A thread of its own reads them, because Python's handlers run in the main thread, and that one may be inside a
    collective call for minutes. Children that this process forks take signals as any process does. SIGHUP, from a
    terminal that was closed, stays ignored where nohup has had it ignored.
    """
    heard.output_dir, heard.peer_failed = Path(output_dir) if output_dir else None, peer_failed
    incoming, outgoing = os.pipe()
    os.set_blocking(outgoing, False)
    terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def read() -> None:
        while numbers := os.read(incoming, 64):
            for number in numbers:  # other signals that have a handler come by here as well
                if number == signal.SIGHUP:
                    let_go_of(terminals)
                if number in SIGNALS and (code := heard.hear(number, time.monotonic())) is not None:
                    leave(code)

    threading.Thread(target=read, name="signals", daemon=True).start()
    signal.set_wakeup_fd(outgoing, warn_on_full_buffer=False)
    for number in not_ignored():
        signal.signal(number, lambda *_: None)  # the handler only makes the interpreter write to the pipe
    # Until it has its own handlers, a child's signals would go to the pipe, and so to this process.
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS),
        after_in_child=start_child,
    )


def listen_no_more() -> None:
    """Take signals as any process does."""
    signal.set_wakeup_fd(-1)
    for number in not_ignored():
        signal.signal(number, signal.SIG_DFL)


def not_ignored() -> list[signal.Signals]:
    """SIGNALS without an ignored SIGHUP. SIGINT is ignored in the background of a script, and heard all the same."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if not (nohup and number == signal.SIGHUP)]


def let_go_of(terminals: list[int]) -> None:
    """Send the output of these streams nowhere, if their terminal is gone: writing there would be an error."""
    for stream in terminals:
        if not os.isatty(stream):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


def start_child() -> None:
    """What a process does first that was forked from one that listens."""
    listen_no_more()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def ignore_in_child() -> None:
    """Leave signals to the parent, which decides, and end with it. Called in a process that multiprocessing started."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)  # it ended before the kernel was asked


def die_with_launcher() -> None:
    """Take the death of the launcher for a SIGTERM; if it has died already, end.

    The workers of a killed torchrun would otherwise train on, and `accelerate launch` with one process passes no signal
    on to it. A process that was started seconds ago, and has been importing, is told nothing of an earlier death.
    """
    if "WORLD_SIZE" in os.environ and "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent(signal.SIGTERM)
    elif "ACCELERATE_MIXED_PRECISION" in os.environ:  # which a user may have exported, in a shell that may end
        with contextlib.suppress(psutil.Error):
            if "accelerate" in " ".join(psutil.Process(os.getppid()).cmdline()):
                die_with_parent(signal.SIGTERM)
    if any(name in os.environ for name in SET_BY_LAUNCHERS) and not launcher_lives():
        print("the launcher of this process has ended: start again", file=sys.stderr, flush=True)
        os._exit(EXIT_PREEMPTED)


def launcher_lives() -> bool:
    """Whether some process above this one is Python; a shell may be in between, and orphans are given to init."""
    try:
        above = [" ".join(process.cmdline()) for process in psutil.Process().parents()]
    except psutil.Error:  # one that may not be looked at, or has ended just now, of which the kernel tells
        return True
    return any(word in command for command in above for word in ("python", "torchrun", "accelerate"))


def die_with_parent(number: int) -> None:
    """Ask the kernel to send this process a signal when its parent has ended."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)


def write_marker(output_dir: Path, step: int | None, received: Mapping[int, int]) -> None:
    """Leave PREEMPTED in the output folder: JSON with the step saved (null: none), when, and each rank's signal."""
    content = {
        "step": step,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "signals": {str(rank): signal.Signals(number).name for rank, number in received.items()},
    }
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        partial = output_dir / f"{MARKER}.partial-{os.getpid()}"
        partial.write_text(json.dumps(content) + "\n")
        partial.rename(output_dir / MARKER)
    except OSError as error:  # the run ends all the same
        print(f"{output_dir / MARKER} could not be written: {error}", file=sys.stderr)


def remove_marker(output_dir: str | Path) -> None:
    """A run that has started, or has finished, is not preempted."""
    (Path(output_dir) / MARKER).unlink(missing_ok=True)
