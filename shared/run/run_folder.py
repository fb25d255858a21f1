"""Opens the output folder of a run, checks it against the run it already holds, and recognizes a finished run."""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from shared.checkpoints import resuming
from shared.checkpoints.progress import Progress
from shared.config import options
from shared.config.meaning import Meaning, fields_with
from shared.disk import remedy
from shared.errors import UserError
from shared.monitoring.hooks import Hook
from shared.monitoring.log import cut_metrics, read_metrics
from shared.processes import folder_lock, signals
from shared.processes.collectives import gather, on_main_process
from shared.processes.writers import check_shared, on_writers
from shared.run.export import CARD
from shared.run.same_run import model_digest, moved, places, refuse_another_run, refuse_changed_data, shown

Config = TypeVar("Config", bound=options.Options)


def open_run(accelerator: Any, config: Config, hooks: Sequence[Hook]) -> tuple[Config, Progress, Path | None]:
    """Open `--output_dir`: the resolved config, the progress to resume from, and its checkpoint (None at the start).

    Call it on every process. Those that write lock the folder until `TrainingRun` closes; the main process reads it and
    sends the result to the others. Nothing in the folder is changed yet.

    Raises:
        UserError: the folder cannot be written, is in use, holds a run with other settings, or contradicts
            --save_on_each_node.
    """
    output_dir = Path(config.output_dir)

    def read_folder() -> dict[str, Any]:
        settings, metrics, model = (output_dir / name for name in ("config.yaml", "metrics.jsonl", "model"))
        lines = read_metrics(metrics) if metrics.exists() else []
        if model.exists() and not settings.is_file():
            raise UserError(
                f"--output_dir {output_dir} holds a folder model/ but no config.yaml: it is not the folder of a "
                "run, and its model would be overwritten; name another folder"
            )
        stored = options.load(settings) if settings.is_file() else {}
        if stored and "output_dir" not in stored:
            raise UserError(f"{settings} was not written by a recipe and would be overwritten: name another folder")
        found = {"config": stored, "finished": model.exists(), "data": data_of(lines)}
        return found | {"model now": model_digest(config)}

    def lock_folder() -> None:
        check_writable(output_dir)
        folder_lock.acquire(output_dir)

    on_writers(accelerator, config, lock_folder)
    check_shared(accelerator, config)
    left = on_main_process(accelerator, read_folder)
    checkpoint, state = resuming.find(accelerator, config) or (None, left)
    stored = state["config"]
    if checkpoint is None and stored and not left["finished"]:
        changed = options.differences(stored, resolve(config, accelerator, None))
        accelerator.print(f"{output_dir} holds a run without a checkpoint{shown(changed)}: the new run replaces it")
        stored = None
    config = resolve(config, accelerator, stored)
    for hook in hooks:
        config = hook.settings(config, stored)
    if stored:
        elsewhere = moved(stored, config, state.get("data") is not None, state.get("model"), left["model now"])
        refuse_another_run(stored, config, checkpoint or output_dir, elsewhere)
        if elsewhere:
            accelerator.print(f"{shown(elsewhere).strip(' ()')}: the run resumes if the content is the same")
    if checkpoint is None:
        data, processes = state["data"] if stored else None, accelerator.num_processes
        return config, Progress(data=data, model=left["model now"], first_processes=processes), None
    if (before := state["threads"]) != (now := torch.get_num_threads()):
        accelerator.print(f"threads was {before} when {checkpoint.name} was saved, is {now}: equal up to rounding")
    return config, Progress.from_state(state | {"model": left["model now"]}), checkpoint


def check_writable(output_dir: Path) -> None:
    """Check that the folder can be written, with a temporary file of 64 KiB.

    Raises:
        UserError: the folder cannot be created or written, or its disk is full.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir) as probe:
            probe.write(bytes(1 << 16))
    except OSError as error:
        raise UserError(
            f"--output_dir {output_dir} cannot be written ({error.strerror}): {remedy(error)}, or name another folder"
        ) from None


def resolve(config: Config, accelerator: Any, stored: Mapping[str, Any] | None) -> Config:
    """Fill in settings that depend on the launch: precision, learning rate, and the global batch size G.

    --gradient_accumulation_steps determines G once, at the first launch. A resumed run keeps G for any number of
    processes, and prints a line if the equation now gives another value.

    Raises:
        UserError: --global_batch_size and --gradient_accumulation_steps contradict each other; shows the equation.
    """
    rate, of_new_weights = options.base_learning_rate(config), config.LEARNING_RATES[0]
    if config.learning_rate is None and stored and stored["learning_rate"] == of_new_weights != rate:
        accelerator.print(f"the run keeps --learning_rate {of_new_weights:g}, which was the default when it began")
        rate = of_new_weights
    config = dataclasses.replace(config, mixed_precision=accelerator.mixed_precision, learning_rate=rate)
    steps, rows = config.gradient_accumulation_steps, config.per_device_train_batch_size
    if steps is None or rows is None:
        return config
    processes = accelerator.num_processes
    size = rows * processes * steps
    equation = f"{rows} per device x {processes} process{'es' * (processes > 1)} x {steps} accumulation steps = {size}"
    given = config.global_batch_size
    if stored:
        if size != stored["global_batch_size"]:
            accelerator.print(
                f"the run keeps the global batch of its first launch, {stored['global_batch_size']}, not {equation}"
            )
        size = given or stored["global_batch_size"]  # `refuse_another_run` refuses a changed value
    elif given not in (None, size):
        raise UserError(
            f"--global_batch_size {given} is not {equation}: leave out one of --global_batch_size and "
            "--gradient_accumulation_steps"
        )
    return dataclasses.replace(config, global_batch_size=size, gradient_accumulation_steps=None)


def begin(accelerator: Any, config: options.Options, progress: Progress) -> None:
    """Write config.yaml and start the clock; called after every check that could refuse the run.

    metrics.jsonl is cut first: a finished run that is continued and dies here must not look finished.
    """
    progress.started = time.perf_counter()
    output_dir = Path(config.output_dir)

    def clean_up() -> None:
        signals.remove_marker(output_dir)
        resuming.remove_partials(output_dir)

    def write() -> None:
        cut_metrics(output_dir / "metrics.jsonl", progress.step)
        options.save(config, output_dir / "config.yaml")

    on_writers(accelerator, config, clean_up)
    on_main_process(accelerator, write)


def finished(
    accelerator: Any, config: options.Options, progress: Progress, load_data: Callable[[], Sequence[Any]]
) -> dict[str, float] | None:
    """The last evaluation if the folder holds this run, finished (it also prints this); else None.

    A run is finished if its model is exported and the config does not prolong it. Call it on every process; the main
    process reads the folder for all. `load_data` returns the training data, the validation data, then anything else.
    Both data sets are compared with those of the run; if their files no longer exist, the printed line says so.

    Raises:
        UserError: the data differ from those of the run, or can no longer be read.
    """
    output_dir = Path(config.output_dir)

    def read_results() -> dict[str, float] | None:
        exported = any((output_dir / "model" / name).is_file() for name in ("config.json", CARD))
        if not exported or not (output_dir / "metrics.jsonl").is_file():
            return None
        lines = read_metrics(output_dir / "metrics.jsonl")
        stored = options.load(output_dir / "config.yaml")
        grown = any(stored[name] != getattr(config, name) for name in fields_with(type(config), Meaning.MAY_GROW))
        if not lines or "train_runtime" not in lines[-1] or grown:
            return None
        last = next(line for line in reversed(lines) if "eval_loss" in line)
        return {name: float(value) for name, value in last.items() if name.startswith("eval_")}

    if (results := on_main_process(accelerator, read_results)) is None:
        return None
    note = compare_data(accelerator, config, progress, load_data)
    on_main_process(accelerator, lambda: signals.remove_marker(output_dir))
    accelerator.print(f"{output_dir} holds this run, finished: {results}{note}")
    return results


def compare_data(
    accelerator: Any, config: options.Options, progress: Progress, load_data: Callable[[], Sequence[Any]]
) -> str:
    """Refuse data that differ from those of a finished run; return why they were not compared, "" if they were."""
    if progress.data is None:
        return "; its data was not compared, because the run was made by an older version, which kept no digest"
    outcome: list[str | None] = [None, None]  # why the data could not be loaded, and the first path that does not exist
    try:
        datasets = load_data()[:2]
    except UserError as error:
        names = [getattr(config, name) for name in fields_with(type(config), Meaning.NAMES_DATA, Meaning.MAY_BE_ON_HUB)]
        gone = (str(path) for name in names if name for path in places(name) if not path.exists())
        outcome = [str(error), next(gone, None)]
    for problem, gone in gather(accelerator, outcome):
        if problem and gone is None:  # all files exist, so the data have changed
            raise UserError(problem)
        if problem:
            return f"; its data was not compared ({problem})"
    refuse_changed_data(accelerator, progress, config, *datasets)
    return ""


def data_of(lines: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """The digests of a finished run's data, from the last line of its metrics.jsonl."""
    return str(lines[-1]["data"]).split() if lines and "data" in lines[-1] else None
