"""A recipe as a command: parse the command line, train, and end every process cleanly."""

import atexit
import gc
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils.memory import should_reduce_batch_size

from shared.config import options
from shared.config.options import AnyConfig
from shared.disk import NO_SPACE, number_of
from shared.errors import Preempted, UserError
from shared.processes import ending, signals
from shared.processes.ending import EXIT_USER_ERROR, end, exit_now, exit_with_error


def run(
    main: Callable[[AnyConfig], object],
    config_class: type[AnyConfig],
    parse: Callable[[type[AnyConfig]], AnyConfig] = options.parse,
) -> None:
    """Parse the command line with `parse(config_class)`, call `main(config)`, and end every process cleanly.

    A `UserError`, a full disk or a lack of memory becomes one line on stderr and exit code 2 on every process. SIGTERM,
    SIGUSR1, SIGHUP and Ctrl-C give exit code 143, after a checkpoint if there is anything to save. In these cases the
    processes leave through `os._exit`: an interpreter that shuts down while gloo's threads run may abort and lose the
    exit code.
    """
    signals.die_with_launcher()
    gc.freeze()  # collections skip the imported modules, so the start takes 0.4 s less
    atexit.register(gc.freeze)  # so do the interpreter's last ones, and the end takes 0.8 s less
    config = config_class()
    try:
        require_numbers()
        require_own_shared(Path(inspect.getfile(main)))
        if ending.local_processes() > 1:
            ending.open_file()
        config = parse(config_class)
        signals.listen(None if config.dry_run else config.output_dir, exit_now, ending.peer_failed)
        main(config)
    except Preempted:
        exit_now(signals.EXIT_PREEMPTED)
    except UserError as error:
        exit_with_error(error)
    except Exception as error:
        if number_of(error) in NO_SPACE:
            exit_with_error(UserError(f"the disk is full ({error}): free space and start again"))
        if ran_out(error):
            exit_with_error(UserError(advice_on_memory(config)))
        if "not have a deterministic implementation" in str(error):
            exit_with_error(UserError(f"--deterministic: {str(error).partition(',')[0]}: leave it out"))
        if peer := ending.peer_behind(error):  # this process has only lost the connection to it
            if peer.line and not ending.peers_that_ended(EXIT_USER_ERROR):  # such a peer prints its error itself
                print(f"error: {peer.line}", file=sys.stderr, flush=True)
            ending.record(signals.EXIT_FAILED)
            exit_now(peer.code)
        ending.record(signals.EXIT_FAILED, f"{type(error).__name__}, see its output")
        raise
    finally:
        ending.unlink_file()
    end()


def require_numbers() -> None:
    """Check that the environment variables of the launcher are numbers, and that each rank is below its count.

    Raises:
        UserError: names those that are not; they are removed, so that the error can be reported like any other.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    if wrong := [f"{name}={os.environ.pop(name)}" for name in names if not os.environ.get(name, "0").isdecimal()]:
        raise UserError(f"{', '.join(wrong)}: expected a number, as a launcher sets it")
    for name, count in (("RANK", int(os.environ.get("WORLD_SIZE", 1))), ("LOCAL_RANK", ending.local_processes())):
        if (rank := int(os.environ.get(name, 0))) >= count:
            os.environ.pop(name, None)
            raise UserError(f"{name} is {rank}, of {count} process(es): ranks count from 0, as a launcher sets them")


def require_own_shared(recipe: Path) -> None:
    """Check that the imported `shared` is the one that lies nearest to a recipe, if any lies beside or above it.

    A recipe that was copied with its `shared` would otherwise use the one that is installed in the environment.

    Raises:
        UserError: names both, and the command that uses the right one.
    """
    here = Path(__file__).resolve()
    place = here.relative_to(here.parents[2])
    nearest = next((folder for folder in recipe.resolve().parents if (folder / place).is_file()), here.parents[2])
    if (nearest / place).resolve() != here:
        raise UserError(
            f"{recipe} would use {here.parents[1]}, which is installed in this environment, instead of "
            f"{nearest / 'shared'}: start it with PYTHONPATH={nearest}"
        )


def ran_out(error: Exception) -> bool:
    """Whether an error means that a device or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error)


def advice_on_memory(config: options.Options) -> str:
    """The error line of a run that is out of memory, with the flags to lower."""
    tokens, rows = config.max_tokens, config.per_device_train_batch_size
    limits = [f"--max_tokens_per_micro_batch {tokens}"] if tokens else []
    limits += [f"--per_device_train_batch_size {rows}"] if rows else []
    fix = f"lower {' or '.join(limits)}" if limits else "set --per_device_train_batch_size"
    if config.SAVES_MEMORY:
        fix = f"use {config.SAVES_MEMORY}, which does not change the run, or {fix}"
    return (
        f"process {os.environ.get('RANK', 0)} ran out of memory: {fix}; if this run has a checkpoint, also use another "
        "--output_dir, because a resumed run keeps its budget"
    )
