"""A recipe as a command: parse the command line, train, and end every process cleanly."""

import errno
import gc
import os
import sys
from collections.abc import Callable

from shared.config import options
from shared.errors import Preempted, UserError
from shared.launch.starting import Config
from shared.processes import exit_reasons, signals
from shared.processes.ending import EXIT_USER_ERROR, end, exit_now, refuse
from shared.run import memory_budget


def run(main: Callable[[Config], object], config_class: type[Config]) -> None:
    """Parse the command line, call `main(config)`, end every process cleanly.

    A `UserError`, or a full disk, becomes one line on stderr and exit code 2 on every process; SIGTERM, SIGUSR1, SIGHUP
    and Ctrl-C end with 143, after a checkpoint if there is anything to save. They leave through `os._exit`, because an
    interpreter that shuts down while gloo's threads run may abort and lose the exit code. Out of memory is code 2 and a
    line as well, but at once: the others are inside a collective call that will never end.
    """
    signals.die_with_launcher()
    gc.freeze()  # what is imported stays: the collections of a start need not go through it each time, 0.4 s
    config = config_class()
    try:
        require_numbers()
        if exit_reasons.local_processes() > 1:
            exit_reasons.open_file()
        config = options.parse(config_class)
        signals.listen(None if config.dry_run else config.output_dir, exit_now, exit_reasons.peer_failed)
        main(config)
    except Preempted:
        exit_now(signals.EXIT_PREEMPTED)
    except UserError as error:
        refuse(error)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        refuse(UserError(f"the disk is full ({error}): free space and start again; a run goes on from its checkpoint"))
    except Exception as error:
        if peer := exit_reasons.peer_behind(error):  # this process has only lost the connection to it
            if peer.line:
                print(f"error: {peer.line}", file=sys.stderr, flush=True)
            exit_reasons.record("failed")
            exit_now(peer.code)
        exit_reasons.record("failed")
        exit_reasons.unlink_file()
        if not memory_budget.ran_out(error):
            exit_reasons.tell_all_machines(signals.EXIT_FAILED, f"{type(error).__name__}, see its output")
            raise
        exit_reasons.tell_all_machines(EXIT_USER_ERROR, memory_budget.advice(config))
        print(f"error: {memory_budget.advice(config)}", file=sys.stderr, flush=True)
        exit_now(EXIT_USER_ERROR)
    end()


def require_numbers() -> None:
    """The launcher's variables are numbers.

    Raises:
        UserError: names one that is not; it is removed, so that the error can be told like any other.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        if not os.environ.get(name, "0").isdecimal():
            raise UserError(f"{name}={os.environ.pop(name)}: expected a number, as a launcher sets it")
