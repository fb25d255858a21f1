"""Which processes write to the output folder: the main process, or with --save_on_each_node one per machine."""

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shared.config.options import Options
from shared.errors import UserError
from shared.processes.collectives import gather, on_main_process

SECONDS_TO_APPEAR = 5.0  # until a file that another machine wrote is visible in a shared folder


def writes(accelerator: Any, config: Options) -> bool:
    """Whether this process writes checkpoints: the main process, or with --save_on_each_node that of each machine."""
    return accelerator.is_local_main_process if config.save_on_each_node else accelerator.is_main_process


def on_writers(accelerator: Any, config: Options, function: Callable[[], Any]) -> list[Any]:
    """Call `function` on the processes that write; return their results, by rank, on every process.

    Raises:
        UserError: `function` raised one; every process raises that of the lowest rank.
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
    """Check that --save_on_each_node is given exactly when the machines do not share the output folder.

    The main process writes a token file, and one process of each machine checks whether it sees the file. Call this on
    every process, once the folder exists.

    Raises:
        UserError: --save_on_each_node is given with a shared folder, or missing without one.
    """
    if sum(gather(accelerator, accelerator.is_local_main_process)) == 1:
        if config.save_on_each_node:
            accelerator.print("--save_on_each_node has no effect on a single machine")
        return
    output_dir = Path(config.output_dir)
    name = on_main_process(accelerator, lambda: f".shared-{uuid.uuid4().hex}")
    if accelerator.is_main_process:
        (output_dir / name).touch()
    gather(accelerator, None)  # waits until the token exists
    visible = _appears(output_dir / name) if accelerator.is_local_main_process else None
    seen = [each for each in gather(accelerator, visible) if each is not None]
    if accelerator.is_main_process:
        (output_dir / name).unlink()
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


def _appears(file: Path) -> bool:
    """Whether a file exists or appears within SECONDS_TO_APPEAR, the delay of network file systems."""
    deadline = time.monotonic() + SECONDS_TO_APPEAR
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
