"""The output folder of a run: whether it can be written, settings that depend on the launch, and the first files."""

import dataclasses
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shared.checkpoints import resuming
from shared.checkpoints.progress import Progress
from shared.config import options
from shared.disk import remedy
from shared.errors import UserError
from shared.monitoring.log import cut_metrics
from shared.processes import signals
from shared.processes.collectives import on_main_process, on_writers

Config = TypeVar("Config", bound=options.Options)


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
    rate = options.base_learning_rate(config)
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
        for partial in output_dir.glob("*.partial-*/"):  # of an export that was killed
            shutil.rmtree(partial, ignore_errors=True)

    def write() -> None:
        cut_metrics(output_dir / "metrics.jsonl", progress.step)
        options.save(config, output_dir / "config.yaml")

    on_writers(accelerator, config, clean_up)
    on_main_process(accelerator, write)


def data_of(lines: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """The digests of a finished run's data, from the last line of its metrics.jsonl."""
    return str(lines[-1]["data"]).split() if lines and "data" in lines[-1] else None
