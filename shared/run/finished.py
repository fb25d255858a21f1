"""Recognizes a finished run in its folder, whose start returns its results."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared.checkpoints.progress import Progress
from shared.config import options
from shared.config.fields import Meaning, fields_with
from shared.errors import UserError
from shared.monitoring.log import read_metrics
from shared.processes import signals
from shared.processes.collectives import gather, on_main_process
from shared.run.export import CARD
from shared.run.resume import places, refuse_changed_data


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
