"""Which processes write the output folder: the main one, or with --save_on_each_node one of each machine."""

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.config.options import Options
from shared.errors import UserError
from shared.processes.collectives import gather, on_main_process

SECONDS_TO_APPEAR = 5.0  # of a file that another machine wrote, in a shared folder


def writes(accelerator: Any, config: Options) -> bool:
    """Whether this process writes checkpoints: the main one of the run, or with --save_on_each_node of its machine."""
    return accelerator.is_local_main_process if config.save_on_each_node else accelerator.is_main_process


def on_writers(accelerator: Any, config: Options, function: Callable[[], Any]) -> list[Any]:
    """Call `function` on the processes that write; every process gets the results of all of them, by rank.

    Raises:
        UserError: the first one that any of them met, on every process.
    """
    outcome: tuple[Any, str | None] | None = None
    if writes(accelerator, config):
        try:
            outcome = function(), None
        except UserError as error:
            outcome = None, str(error)
    outcomes = [each for each in gather(accelerator, outcome) if each]
    for _, message in outcomes:
        if message:
            raise UserError(message)
    return [result for result, _ in outcomes]


def check_shared(accelerator: Any, config: Options) -> None:
    """Find out whether the machines share the output folder; call it on every process, once the folder is there.

    The main process writes a token, and one process of each machine looks for it.

    Raises:
        UserError: --save_on_each_node does not say what is the case.
    """
    if sum(gather(accelerator, accelerator.is_local_main_process)) == 1:
        if config.save_on_each_node:
            accelerator.print("--save_on_each_node has no effect on a single machine")
        return
    output_dir = Path(config.output_dir)
    name = on_main_process(accelerator, lambda: f".shared-{uuid.uuid4().hex}")
    if accelerator.is_main_process:
        (output_dir / name).touch()
    gather(accelerator, None)  # it is there now
    sees = _appears(output_dir / name) if accelerator.is_local_main_process else None
    seen = [each for each in gather(accelerator, sees) if each is not None]
    if accelerator.is_main_process:
        (output_dir / name).unlink()
    if config.save_on_each_node and any(seen[1:]):
        raise UserError(
            f"--save_on_each_node, but --output_dir {output_dir} is a folder that machines share: leave the flag out, "
            "or name a folder that each machine has for itself"
        )
    if not config.save_on_each_node and not all(seen):
        raise UserError(
            f"--output_dir {output_dir} is not shared, {seen.count(False)} of {len(seen)} machines do not see what the "
            "main one writes there: name a folder on a shared file system, or give --save_on_each_node"
        )


def _appears(file: Path) -> bool:
    """Whether a file is there, or appears within the time that network file systems take."""
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
