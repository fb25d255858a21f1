"""Save and resume: a checkpoint is complete or absent, and continues the run it came from or is refused.

A checkpoint holds what `accelerator.save_state` writes, `state.json` (where the run is, what decided it) and, last,
`manifest.json` with the size and digest of every file. Nothing random is restored from it: every draw of a run is a
function of (seed, step or epoch, sample or micro-batch).
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from shared import options
from shared.batches import Plan
from shared.errors import UserError
from shared.launch import agree, on_main_process
from shared.options import Options
from shared.progress import Progress

State = dict[str, Any]


def folder(output_dir: str | Path) -> Path:
    """Where a run keeps its checkpoints."""
    return Path(output_dir) / "checkpoints"


def save(accelerator: Any, config: Options, plan: Plan, progress: Progress) -> Path:
    """Write the checkpoint of `progress.step`; call it on every process.

    The files go to a folder of a temporary name, which is renamed when every process has written its own; only then are
    older checkpoints removed, down to the newest --save_total_limit and the best one if the run ends with it.

    Raises:
        UserError: some process could not write, on all of them.
    """
    final = folder(config.output_dir) / f"step_{progress.step:08d}"
    partial = final.with_name(final.name + ".partial")

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def commit() -> None:
        state = progress.state() | {
            "epoch": plan.epochs_completed(progress.step),
            "seed": config.seed,
            "config": options.plain(config),
            "world_size": accelerator.num_processes,
            "threads": torch.get_num_threads(),
            "versions": {name: version(name) for name in ("torch", "accelerate", "transformers", "numpy")},
        }
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        write_manifest(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        sync(final.parent)
        best = progress.best_step if config.load_best_model_at_end else None
        rotate(config.output_dir, config.save_total_limit, best)

    on_main_process(accelerator, lambda: _writing(partial, begin))
    error = None
    try:
        _writing(partial, lambda: accelerator.save_state(str(partial)))
    except UserError as problem:
        error = problem
    try:
        agree(accelerator, error)
        on_main_process(accelerator, lambda: _writing(partial, commit))
    except UserError:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)  # what did not fit need not take the space
        raise
    return final


def _writing(path: Path, write: Callable[[], object]) -> None:
    """Turn a failure to write into a UserError."""
    try:
        write()
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, as Python, torch and safetensors report it
        raise UserError(f"cannot save {path} ({error}): free space, or set another --output_dir") from None


def due(config: Options, plan: Plan, progress: Progress) -> bool:
    """Whether a checkpoint is to be saved after `progress.step` steps: by --checkpointing_steps, or as the best one."""
    if config.load_best_model_at_end and progress.best_step == progress.step:
        return True
    every = config.checkpointing_steps
    return every != "no" and plan.due(None if every == "epoch" else int(every), progress.step - 1)


def rotate(output_dir: str | Path, keep: int | None, best: int | None) -> None:
    """Remove all complete checkpoints but the newest `keep` and that of step `best`."""
    found = complete(output_dir)
    for step in sorted(found)[: -keep if keep else 0]:
        if step != best:
            shutil.rmtree(found[step])


def complete(output_dir: str | Path) -> dict[int, Path]:
    """The checkpoints that were written to the end, by step; other things in the folder are left alone."""
    found = {}
    for path in folder(output_dir).glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdigit() and (path / "manifest.json").is_file():
            found[int(number)] = path
    return found


def remove_partials(output_dir: str | Path) -> None:
    """Remove what saves of a run that is dead left unfinished, and say so. Only the main process calls it."""
    for partial in folder(output_dir).glob("step_*.partial"):
        shutil.rmtree(partial)
        print(f"removed {partial}, a checkpoint that was never finished")


def write_manifest(path: Path) -> None:
    """Record size and SHA-256 of every file of a checkpoint, after making sure that they are on disk."""
    files = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        sync(file)
        files[str(file.relative_to(path))] = {"bytes": file.stat().st_size, "sha256": digest(file)}
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps(files, indent=1))
    sync(manifest)
    sync(path)


def problem_with(path: Path) -> str | None:
    """Why a checkpoint cannot be read, or None: every file of its manifest must have its size and digest."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        for name, expected in json.loads((path / "manifest.json").read_text()).items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"] or digest(file) != expected["sha256"]:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError) as error:
        return f"its manifest cannot be read ({error})"
    return None


def find(output_dir: str | Path, resume_from: str) -> tuple[Path, State] | None:
    """The checkpoint to go on from and its state; None for a run from the start. Only the main process asks.

    It looks from the newest backwards and says why it passes one over; `resume_from` is auto, never or the path of a
    checkpoint.

    Raises:
        UserError: the checkpoint named by a path is missing or damaged; `never`, but there are checkpoints.
    """
    found = complete(output_dir)
    if resume_from == "never":
        if found:
            raise UserError(
                f"--resume_from_checkpoint never, but {folder(output_dir)} holds checkpoints up to step {max(found)}: "
                "set another --output_dir, or remove them"
            )
        return None
    if resume_from != "auto":
        path = Path(resume_from)
        if problem := problem_with(path):
            raise UserError(f"--resume_from_checkpoint {path}: {problem}; use auto for the newest complete one")
        return path, read_state(path)
    for step in sorted(found, reverse=True):
        if problem := problem_with(found[step]):
            print(f"checkpoint {found[step]} is passed over: {problem}", file=sys.stderr)
        else:
            return found[step], read_state(found[step])
    return None


def read_state(path: Path) -> State:
    """state.json of a checkpoint."""
    return json.loads((path / "state.json").read_text())


def load(accelerator: Any, path: Path) -> None:
    """Load model, optimizer and scaler from a checkpoint; call it on every process, after `prepare`."""
    accelerator.load_state(str(path))


def load_best(accelerator: Any, config: Options, progress: Progress) -> None:
    """Go back to the best step's model, if the run ends with it and it is not the last step's."""
    if config.load_best_model_at_end and progress.best_step not in (None, progress.step):
        load(accelerator, complete(config.output_dir)[progress.best_step])


def digest(file: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Have a file or folder written to disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
