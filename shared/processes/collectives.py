"""Operations that all processes of a run call together, and the processes that write: one, or one per machine."""

import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shared.config.options import Options
from shared.errors import UserError
from shared.processes import barrier

SECONDS_TO_APPEAR = 5.0  # until a file that another machine wrote is visible in a shared folder


def gather(accelerator: Any, value: Any) -> list[Any]:
    """Return the `value` of every process, by rank. Every process must call this; it waits for slow ones."""
    values: list[Any] = [value]
    if accelerator.num_processes > 1:
        barrier.wait_for_all(accelerator)
        values = [None] * accelerator.num_processes
        torch.distributed.all_gather_object(values, value)
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
    """Call `function` on the processes that write; return their results, by rank, on every process.

    Raises:
        UserError: `function` raised one; every process raises that of the lowest rank.
    """
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

    def write_token() -> str:
        token = output_dir / f".shared-{uuid.uuid4().hex}"
        token.touch()
        return token.name

    token = output_dir / on_main_process(accelerator, write_token)
    visible = _appears(token) if accelerator.is_local_main_process else None
    seen = [each for each in gather(accelerator, visible) if each is not None]
    if accelerator.is_main_process:
        token.unlink()
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
