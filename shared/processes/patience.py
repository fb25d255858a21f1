"""Waiting for processes that have much to do: for hours if need be, but only while they live.

A collective call fails when some process comes to it later than the process group's time-out, because that is how a
lost machine is noticed. So all meet here before one that some process may come to late: after an upload, the digests of
a large checkpoint, a save to a disk that hangs, preparing data. The connections of this meeting have a time-out of a
day, and a thread of each process leaves signs of life in the group's store. A process that ends is noticed at once,
since it closes its connections; one whose signs stop, in as long as a collective call would take to notice it.
"""

import sys
import threading
import time
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from shared.compat import of_torch
from shared.errors import UserError

SIGN_EVERY = 20.0  # seconds between signs of life
SILENT = 300.0  # seconds without one after which a process counts as lost
PROCESS_GROUP_TIMEOUT = timedelta(seconds=SILENT)
GIVE_UP = timedelta(days=1)
SIGN = "accelerate-recipes/alive-{}"  # a key in the group's store: how many meetings a rank has come to, and a clock


def for_all(accelerator: Any) -> None:
    """Return when every process has come here, however long that takes; call it on all of them.

    The first time, at the start, the group's own time-out holds.

    Raises:
        UserError: one of them gives no sign of life.
        RuntimeError: one of them has ended.
    """
    if accelerator.num_processes == 1:
        return
    store = of_torch.default_store()
    if not _rooms or _rooms[0].store is not store:
        close()
        accelerator.wait_for_everyone()  # making the room takes no notice of processes that are lost
        _rooms.append(Room(store, accelerator.process_index, accelerator.num_processes))
    _rooms[0].meet()


def close() -> None:
    """No more meetings: call it before the process group is destroyed."""
    while _rooms:
        room = _rooms.pop()
        room.closed.set()
        room.thread.join()


class Room:
    """Where the processes of a group meet. Constructed on all of them."""

    def __init__(self, store: dist.Store, rank: int, processes: int) -> None:
        self.store, self.rank = store, rank
        self.keys = [SIGN.format(each) for each in range(processes)]
        self.meetings = 0
        self.closed = threading.Event()
        self.sign()
        self.group = dist.new_group(backend="gloo", timeout=GIVE_UP)  # every key is there when it is made
        self.thread = threading.Thread(target=self.sign_on, name="signs of life", daemon=True)
        self.thread.start()

    def sign(self) -> None:
        """Leave a sign of life."""
        self.store.set(self.keys[self.rank], f"{self.meetings} {time.monotonic()}")

    def sign_on(self) -> None:
        """Leave one again and again."""
        while not self.closed.wait(SIGN_EVERY):
            try:
                self.sign()
            except dist.DistError:
                return  # the store has ended, and with it the run

    def meet(self) -> None:
        """Return when all are here; say once whom it waits for, if that is long."""
        self.meetings += 1
        began, said = time.monotonic(), False
        signs: dict[int, tuple[bytes, float]] = {}  # of each rank the last one, and when it was new
        arrival = dist.barrier(group=self.group, async_op=True)
        while not complete(arrival, SIGN_EVERY):
            self.sign()  # that it waits
            now = time.monotonic()
            latest = self.store.multi_get(self.keys)
            for rank, sign in enumerate(latest):
                if rank not in signs or signs[rank][0] != sign:
                    signs[rank] = sign, now
                elif now - signs[rank][1] > SILENT:
                    raise UserError(
                        f"process {rank} has given no sign of life for {SILENT:g} s: it hangs, or its machine or "
                        "network is lost; end what is left of the run and start it again"
                    )
            late = [rank for rank, sign in enumerate(latest) if int(sign.split()[0]) < self.meetings]
            first = next(rank for rank in range(len(latest)) if rank not in late)
            if now - began > SILENT and self.rank == first and not said:
                said = True
                whom = ", ".join(map(str, late[:8]))
                print(f"waiting for process {whom}, which is at work since {SILENT:g} s", file=sys.stderr, flush=True)


_rooms: list[Room] = []  # that of the process group, from the first meeting on


def complete(work: dist.Work, seconds: float) -> bool:
    """Whether a collective call is complete, after waiting for it for so long.

    Raises:
        RuntimeError: it has failed.
    """
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False  # this wait is over, and the call goes on
        work.wait()
    return True
