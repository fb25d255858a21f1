"""Operations that all processes of a run call together, and the processes that write: one, or one per machine.

A collective call fails when one process reaches it later than the process group's timeout, which is short so that the
loss of a machine is noticed. Some work takes longer on one process: an upload, digests of a large checkpoint, a slow
disk, preparing data. After such work all processes call `wait_for_all` before the next collective; `gather` does so by
itself. This barrier waits up to a day, and a thread of each process writes heartbeats to the group's store. It fails
immediately when a process ends, because its connections close, and HEARTBEAT_TIMEOUT after its last heartbeat.
"""

import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import distributed as dist

from shared.compat import of_torch
from shared.config.options import Options
from shared.errors import UserError, listed

HEARTBEAT_INTERVAL = 20.0  # seconds
HEARTBEAT_TIMEOUT = 300.0  # seconds without a heartbeat after which a process counts as lost
PROCESS_GROUP_TIMEOUT = timedelta(seconds=HEARTBEAT_TIMEOUT)
BARRIER_TIMEOUT = timedelta(days=1)
HEARTBEAT_KEY = "accelerate-recipes/alive-{}"  # by rank; the value: the number of barriers it has reached, and a time
SECONDS_TO_APPEAR = 5.0  # until what another machine wrote is visible in a shared folder: the delay of its cache


def gather(accelerator: Any, value: Any) -> list[Any]:
    """Return the `value` of every process, by rank. Every process must call this; it waits for slow ones."""
    values: list[Any] = [value]
    if accelerator.num_processes > 1:
        wait_for_all(accelerator)
        values = [None] * accelerator.num_processes
        dist.all_gather_object(values, value)
    return values


def agree(accelerator: Any, error: UserError | None) -> None:
    """Raise the error of the lowest rank that has one, on every process. Every process must call this.

    Raises:
        UserError: at least one process passed an `error`.
    """
    messages = gather(accelerator, str(error) if error else None)
    if message := next(filter(None, messages), None):
        raise UserError(message)


def on_main_process(accelerator: Any, function: Callable[[], Any]) -> Any:
    """Call `function` on the main process only; return its result, or raise its UserError, on every process."""
    return on_some(accelerator, accelerator.is_main_process, function)[0]


def writes(accelerator: Any, config: Options) -> bool:
    """Whether this process writes checkpoints: the main process, or with --save_on_each_node that of each machine."""
    return accelerator.is_local_main_process if config.save_on_each_node else accelerator.is_main_process


def on_writers(accelerator: Any, config: Options, function: Callable[[], Any]) -> list[Any]:
    """Call `function` on the processes that write; return their results, or raise a UserError, as `on_some` does."""
    return on_some(accelerator, writes(accelerator, config), function)


def on_some(accelerator: Any, acts: bool, function: Callable[[], Any], kind: type[Exception] = UserError) -> list[Any]:
    """Call `function` on the processes that act; return their results, by rank, on every process.

    If it raises an error of this `kind`, every process raises that of the lowest rank.
    """
    outcome: tuple[Any, Exception | None] | None = None
    if acts:
        try:
            outcome = function(), None
        except kind as error:
            outcome = None, error
    outcomes = [each for each in gather(accelerator, outcome) if each]
    for _, problem in outcomes:
        if problem:
            raise problem
    return [result for result, _ in outcomes]


def check_shared(accelerator: Any, config: Options) -> None:
    """Check that --save_on_each_node is given exactly when the machines do not share the output folder.

    The main process makes a folder in it, and one process of each machine checks whether it sees that. Call this on
    every process, once --output_dir exists.

    Raises:
        UserError: --save_on_each_node is given with a shared folder, or missing without one.
    """
    if sum(gather(accelerator, accelerator.is_local_main_process)) == 1:
        if config.save_on_each_node:
            accelerator.print("--save_on_each_node has no effect on a single machine")
        return
    output_dir = Path(config.output_dir)
    token = output_dir / on_main_process(accelerator, lambda: Path(mkdtemp(prefix=".shared-", dir=output_dir)).name)
    if not token.exists():
        time.sleep(SECONDS_TO_APPEAR)
    everybody = gather(accelerator, (token.exists(), accelerator.is_local_main_process))
    seen = [sees for sees, is_first_of_machine in everybody if is_first_of_machine]
    if accelerator.is_main_process:
        token.rmdir()
    if config.save_on_each_node and any(seen[1:]):
        raise UserError(
            f"--save_on_each_node, but --output_dir {output_dir} is shared by several machines: leave the flag out, or "
            "name a folder on each machine's own disk"
        )
    if not config.save_on_each_node and not all(seen):
        raise UserError(
            f"--output_dir {output_dir} is not shared, {seen.count(False)} of {len(seen)} machines do not see what the "
            "main process writes: name a folder on a shared file system, or give --save_on_each_node"
        )


def wait_for_all(accelerator: Any) -> None:
    """Return when every process has called this. The first call, at the start, has the process group's own timeout.

    Raises:
        UserError: a process sends no heartbeats.
        RuntimeError: a process has ended.
    """
    if accelerator.num_processes == 1:
        return
    store = of_torch.default_store()
    if not _barriers or _barriers[0].store is not store:
        close()
        meet(accelerator)  # making the barrier does not notice lost processes
        _barriers.append(Barrier(store, accelerator.process_index, accelerator.num_processes))
    _barriers[0].wait()


def meet(accelerator: Any) -> None:
    """The barrier of the default process group, with its timeout.

    NCCL needs the index of a GPU, gloo needs none. Accelerate's own barrier passes LOCAL_RANK as the index to both, and
    fails where processes share a GPU.
    """
    dist.barrier(device_ids=None if dist.get_backend() == "gloo" else [accelerator.device.index])


def group_of_all(accelerator: Any) -> dist.ProcessGroup | None:
    """The barrier's gloo group, for calls that wait as long as it does; None if there is only one process.

    Every process must call this; it is a barrier.
    """
    wait_for_all(accelerator)
    return _barriers[0].group if accelerator.num_processes > 1 else None


def close() -> None:
    """Stop the heartbeats; call it before the process group is destroyed."""
    while _barriers:
        barrier = _barriers.pop()
        barrier.closed.set()
        barrier.thread.join()


class Barrier:
    """The barrier of a process group. Every process of the group must construct it."""

    def __init__(self, store: dist.Store, rank: int, processes: int) -> None:
        self.store, self.rank = store, rank
        self.keys = [HEARTBEAT_KEY.format(each) for each in range(processes)]
        self.calls = 0
        self.closed = threading.Event()
        self.send_heartbeat()
        self.group = dist.new_group(backend="gloo", timeout=BARRIER_TIMEOUT)  # afterwards, all keys are in the store
        self.thread = threading.Thread(target=self.send_heartbeats, name="heartbeats", daemon=True)
        self.thread.start()

    def send_heartbeat(self) -> None:
        """Write a heartbeat to the store."""
        self.store.set(self.keys[self.rank], f"{self.calls} {time.monotonic()}")

    def send_heartbeats(self) -> None:
        """Write heartbeats to the store until `closed` is set or the store has ended."""
        while not self.closed.wait(HEARTBEAT_INTERVAL):
            try:
                self.send_heartbeat()
            except dist.DistError:
                return  # the store has ended, and with it the run

    def wait(self) -> None:
        """Return when all processes have called this; after HEARTBEAT_TIMEOUT, print once which ones are missing."""
        self.calls += 1
        began, printed = time.monotonic(), False
        heartbeats: dict[int, tuple[bytes, float]] = {}  # of each rank: the last one, and when it was first read
        arrival = dist.barrier(group=self.group, async_op=True)
        while not completes_within(arrival, HEARTBEAT_INTERVAL):
            self.send_heartbeat()  # shows that this process has reached the barrier
            now = time.monotonic()
            latest = self.store.multi_get(self.keys)
            for rank, heartbeat in enumerate(latest):
                if rank not in heartbeats or heartbeats[rank][0] != heartbeat:
                    heartbeats[rank] = heartbeat, now
                elif now - heartbeats[rank][1] > HEARTBEAT_TIMEOUT:
                    raise UserError(
                        f"process {rank} has sent no heartbeat for {HEARTBEAT_TIMEOUT:g} s: it hangs, or its machine "
                        "or network is lost; end the other processes of the run and start it again"
                    )
            late = [rank for rank, heartbeat in enumerate(latest) if int(heartbeat.split()[0]) < self.calls]
            first = next(rank for rank in range(len(latest)) if rank not in late)
            if now - began > HEARTBEAT_TIMEOUT and self.rank == first and not printed:
                printed = True
                busy = f"waiting for process {listed(late, 8)}, busy for {HEARTBEAT_TIMEOUT:g} s"
                print(busy, file=sys.stderr, flush=True)


_barriers: list[Barrier] = []  # at most one: that of the current process group


def completes_within(work: dist.Work, seconds: float) -> bool:
    """Wait for a collective call for up to `seconds`; return whether it is complete.

    Raises:
        RuntimeError: the call has failed.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False  # only this wait has timed out, the call continues
        work.wait()
    return True
