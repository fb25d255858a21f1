"""How a process of a run ends: with one line and exit code 2, at once, or cleanly."""

import gc
import os
import signal
import sys
import time
from typing import NoReturn

import torch

from shared.errors import UserError
from shared.processes import exit_reasons, folder_lock, patience, signals

EXIT_USER_ERROR = 2


def refuse(error: UserError) -> NoReturn:
    """End this process with exit code 2; local rank 0 says why, the others are silent.

    All wait up to 10 s for each other: once one process has ended, the launcher kills those that are still importing.
    """
    here, deadline = exit_reasons.local_rank(), time.monotonic() + 10
    signals.listen_no_more()
    signal.signal(signal.SIGTERM, lambda *_: exit_now(EXIT_USER_ERROR))  # the launcher's, once another process has left
    if here == 0:
        print(f"error: {error}", file=sys.stderr, flush=True)
    exit_reasons.say("refused")
    exit_reasons.tell_all_machines(EXIT_USER_ERROR, str(error))
    awaited = range(1, exit_reasons.local_processes()) if here == 0 else [0]
    while not all(map(exit_reasons.ended, awaited)):
        if time.monotonic() > deadline:
            if here != 0:
                print(f"error: {error}", file=sys.stderr, flush=True)  # only this process met the error
            break
        time.sleep(0.05)
    exit_now(EXIT_USER_ERROR)


def exit_now(code: int) -> NoReturn:
    """End at once, without the interpreter's shutdown."""
    folder_lock.release_all()
    if code == signals.EXIT_PREEMPTED:
        exit_reasons.say("preempted")
    exit_reasons.clean_up()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end() -> None:
    """End the process group, so that two-process runs exit with 0.

    A DDP model that is still alive when gloo's threads are torn down aborts one run in four ("terminate called without
    an active exception"), so this is called when `main` has returned and its model is garbage.
    """
    from accelerate import PartialState

    gc.collect()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        patience.for_all(PartialState())  # the main process may be uploading
        torch.distributed.barrier()
        patience.close()
        exit_reasons.known.store = None
        PartialState().destroy_process_group()
