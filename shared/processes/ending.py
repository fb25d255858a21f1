"""End a process of a run: with a one-line error and exit code 2, immediately, or with a clean shutdown."""

import gc
import os
import signal
import sys
import time
from typing import NoReturn

import torch

from shared.errors import UserError
from shared.processes import barrier, exit_reasons, folder_lock, signals

EXIT_USER_ERROR = 2


def refuse(error: UserError) -> NoReturn:
    """End this process with exit code 2; the process with the lowest local rank that is refused prints its error.

    Processes of one machine wait up to 10 s for each other: after the first exit, the launcher kills the others.
    """
    here, deadline = exit_reasons.local_rank(), time.monotonic() + 10
    signals.stop_listening()

    def leave(*_: object) -> NoReturn:
        if here != 0 and not any(exit_reasons.recorded(rank, "refused") for rank in range(here)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        exit_now(EXIT_USER_ERROR)

    signal.signal(signal.SIGTERM, leave)  # sent by the launcher after the first exit
    if here == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    exit_reasons.record("refused")
    exit_reasons.tell_all_machines(EXIT_USER_ERROR, str(error))
    awaited = range(1, exit_reasons.local_processes()) if here == 0 else [0]
    while not all(map(exit_reasons.has_ended, awaited)) and time.monotonic() < deadline:
        time.sleep(0.05)
    leave()


def exit_now(code: int) -> NoReturn:
    """End immediately, without the interpreter's shutdown."""
    folder_lock.release_all()
    if code == signals.EXIT_PREEMPTED:
        exit_reasons.record("preempted")
    exit_reasons.clean_up()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end() -> None:
    """Destroy the process group, so that a run with several processes exits with 0.

    Call it after `main` has returned and its model can be freed: if a DDP model is still alive when gloo's threads
    stop, one run in four aborts ("terminate called without an active exception").
    """
    from accelerate import PartialState

    gc.collect()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        barrier.wait_for_all(PartialState())  # the main process may be uploading
        barrier.meet(PartialState())
        barrier.close()
        exit_reasons.known.store = None
        PartialState().destroy_process_group()
