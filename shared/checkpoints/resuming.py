"""Resuming: a checkpoint is complete or absent; it resumes the run that saved it, or is refused.

A checkpoint holds the tensors of the run (shared/checkpoints/states.py), `state.json` (all else, with the position and
the settings of the run) and, written last, `manifest.json` with the size and digest of every file. No random state is
kept: every draw of a run is a function of (seed, step or epoch, sample or micro-batch).
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

from shared.checkpoints import folders
from shared.checkpoints.folders import folder, path_of, problem_with
from shared.config.options import Options
from shared.errors import UserError, complain, listed
from shared.processes.collectives import gather, on_main_process, on_writers

State = dict[str, Any]
NEW_RUN = (
    "begin a new run in another --output_dir, without --resume_from_checkpoint, --decay_from and this "
    "--mirror_checkpoints"
)


def checkpoints_of(output_dir: str | Path) -> dict[int, Path]:
    """The complete checkpoints of a run, by step; other entries of the folder are ignored."""
    return folders.complete_in(folder(output_dir))


def find(accelerator: Any, config: Options) -> tuple[Path, State] | None:
    """The checkpoint to resume from and its state; None for a run from the start. Call it on every process.

    The processes that write check the checkpoints together, from the newest backwards, and print why one is skipped.
    With --save_on_each_node it has to be intact on every machine.

    Raises:
        UserError: the checkpoint named by a path is missing or damaged; `never`, but there are checkpoints; some
            machines have intact checkpoints, but no checkpoint is intact on all machines.
    """
    asked = config.resume_from_checkpoint

    def refuse() -> None:
        if asked != "never" and (problem := problem_with(Path(asked))):
            raise UserError(f"--resume_from_checkpoint {asked}: {problem}; use auto for the newest complete one")
        if asked == "never" and (found := checkpoints_of(config.output_dir)):
            raise UserError(
                f"--resume_from_checkpoint never, but {folder(config.output_dir)} holds checkpoints up to step "
                f"{max(found)}: set another --output_dir, or remove them"
            )

    path: Path | None = None
    # A path or `never` is meant for the first start: obeying it at a restart would lose the steps trained since.
    if asked == "auto" or any(gather(accelerator, started_again())):
        path = newest_intact(accelerator, config)
    if path is None and asked != "auto":
        on_writers(accelerator, config, refuse)
        path = None if asked == "never" else Path(asked)
        steps = on_writers(accelerator, config, lambda: read_state(Path(asked))["step"]) if path else []
        if len({*steps}) > 1:
            raise UserError(f"--resume_from_checkpoint names step {listed(steps, 8)} on the machines: name one step")
    return (path, on_main_process(accelerator, lambda: read_state(path))) if path else None


def started_again() -> bool:
    """Whether torchrun or SLURM has started this job before, with the same command."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


def newest_intact(accelerator: Any, config: Options) -> Path | None:
    """The newest checkpoint in --output_dir that is intact for all processes that write there.

    Raises:
        UserError: with --save_on_each_node, some machines have intact checkpoints, but none is intact on all machines.
    """
    found = on_writers(accelerator, config, lambda: list(checkpoints_of(config.output_dir)))
    in_part = ""
    for step in sorted(set().union(*found), reverse=True):
        path = path_of(config.output_dir, step)
        machines = on_writers(accelerator, config, lambda path=path: (socket.gethostname(), problem_with(path)))  # type: ignore[misc]
        lack = [f"{i} ({host})" for i, (host, problem) in enumerate(machines) if problem]
        has = [f"{i} ({host})" for i, (host, problem) in enumerate(machines) if not problem]
        if not lack:
            return path
        if has and not in_part:
            in_part = (
                f"checkpoint {path} is intact on machine {has[0]} but not on machine {listed(lack, 8)}: copy that "
                f"folder from there, remove {path.parent} on all of them to start over, or name another --output_dir"
            )
        if accelerator.is_main_process:
            on = f" on machine {lack[0]}" if config.save_on_each_node else ""
            problem = next(problem for _, problem in machines if problem)
            complain(f"checkpoint {path} is skipped{on}: {problem}")
    if in_part:  # most likely a machine was replaced: a start at step 0 would lose the run
        raise UserError(in_part)
    return None


def read_state(path: Path) -> State:
    """The content of a checkpoint's state.json."""
    return json.loads((path / "state.json").read_text())
