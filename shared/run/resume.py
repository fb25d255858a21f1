"""The output folder of a run, and how a start continues the run in it. A start asks four questions, in this order:

1. Which is the newest intact checkpoint? `open_run` asks `resuming.find`.
2. Are the settings and the model those of the run? `open_run` refuses others.
3. Are the data and their order those of the run? `refuse_changed_data` asks, once the recipe has loaded them, and
   `refuse_another_plan`, once it has planned the steps.
4. Does the model fit? `Saver.load` reads the checkpoint into it, once it is wrapped for the processes.

A run without a checkpoint answers only those that its folder can answer.
"""

import socket
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shared.checkpoints import resuming
from shared.checkpoints.folders import PARTIAL
from shared.checkpoints.progress import Progress
from shared.config import options
from shared.config.fields import Meaning, fields_with
from shared.config.options import AnyConfig
from shared.disk import remove_unfinished
from shared.errors import UserError, about
from shared.monitoring.hooks import Hook
from shared.monitoring.log import cut_metrics, read_metrics
from shared.plan import draws
from shared.plan.batches import Plan
from shared.processes import folder_lock, signals
from shared.processes.collectives import check_shared, gather, on_main_process, on_writers


def open_run(
    accelerator: Any, config: AnyConfig, hooks: Sequence[Hook] = ()
) -> tuple[AnyConfig, Progress, Path | None, bool]:
    """Open `--output_dir`: the resolved config, the progress to resume from, and its checkpoint (None at the start).

    The last value says whether the folder holds this run, finished: its model is exported, and the config does not
    prolong it. The progress then has the last evaluation.

    Call it on every process. Those that write lock the folder until `TrainingRun` closes; the main process reads it and
    sends the result to the others. Nothing in the folder is changed yet, except by a hook that adds checkpoints.

    Raises:
        UserError: the folder cannot be written, is in use, belongs to a run with other settings, or contradicts
            --save_on_each_node; or see `resuming.find`.
    """
    output_dir = Path(config.output_dir)
    on_writers(accelerator, config, lambda: lock(output_dir))
    check_shared(accelerator, config)
    for hook in hooks:
        hook.folder_locked()
    left, digest = on_main_process(accelerator, lambda: (read_folder(output_dir), config.model_digest()))
    found = resuming.find(accelerator, config)
    is_new = not found and not left["has_model"]
    start = next(filter(None, [hook.first_checkpoint() for hook in hooks if is_new]), None)
    checkpoint, state = found or start or (None, left)
    stored = state["config"]
    if checkpoint is None and stored and not left["has_model"]:
        changed = options.differences(stored, config.settled(accelerator, None))
        accelerator.print(f"{output_dir} holds a run without a checkpoint{in_words(changed)}: the new run replaces it")
        stored = None
    config = config.settled(accelerator, stored)
    if stored:
        elsewhere = config.moved(state, digest)
        refuse_another_run(stored, config, checkpoint or output_dir, elsewhere)
        if left["config"] and checkpoint and checkpoint.resolve().parent != resuming.folder(output_dir).resolve():
            refuse_another_run(left["config"], config, output_dir, elsewhere)  # an earlier start, or another run
        if elsewhere:
            accelerator.print(f"{in_words(elsewhere).strip(' ()')}: the run resumes if the content is the same")
    if checkpoint is None:
        data, processes = state["data"] if stored else None, accelerator.num_processes
        progress = Progress(data=data, model=digest, first_processes=processes)
    else:
        progress = Progress.from_state(state | {"model": digest})
        if (before := state["threads"]) != (now := torch.get_num_threads()):
            accelerator.print(f"threads was {before} when {checkpoint.name} was saved, is {now}: equal up to rounding")
    may_grow = fields_with(type(config), Meaning.MAY_GROW)
    finished = left["results"] is not None and all(left["config"][name] == getattr(config, name) for name in may_grow)
    if finished:
        progress.results = left["results"]
    return config, progress, checkpoint, finished


def refuse_another_plan(config: options.Options, progress: Progress, plan: Plan, checkpoint: Path | None) -> None:
    """Refuse to resume from a checkpoint after which the run would have other samples or evaluations.

    It belongs to a version of this project that orders the samples in another way; or it is the end of a shorter run,
    and this run is another one there.

    Raises:
        UserError: names the checkpoint and the ways out.
    """
    if not checkpoint:
        return
    if progress.order != draws.VERSION:
        raise UserError(
            f"{checkpoint} belongs to a run that orders its samples in another way (version {progress.order} of the "
            f"order; this code has version {draws.VERSION}): finish it with the version of this project that began it, "
            f"or {resuming.NEW_RUN}"
        )
    if progress.step >= plan.total_steps:
        return
    problem = ""
    if progress.monitor["total_samples"] < progress.step * plan.global_batch_size:
        problem = f"whose last step had fewer than --global_batch_size {plan.global_batch_size} samples"
    elif progress.evaluated_at_end and (config.load_best_model_at_end or config.early_stopping_patience is not None):
        problem = f"whose last evaluation a longer run does not make (--eval_steps {config.eval_steps})"
    if problem:
        raise UserError(
            f"{checkpoint} is the end of a shorter run or came after it, {problem}: begin at an earlier checkpoint "
            "(--resume_from_checkpoint or --decay_from PATH; at a restart of such a start, remove this one), or "
            f"{resuming.NEW_RUN}"
        )


def read_folder(output_dir: Path) -> dict[str, Any]:
    """What the main process reads in the folder of a run.

    Returns:
        `config`, its settings, {} if there are none; `has_model`; and if metrics.jsonl ends as
        that of a complete run, `data`, the digests of its data, and `results`, its last evaluation, else None.

    Raises:
        UserError: the folder has files that are not those of a run and would be overwritten.
    """
    settings, metrics, model = (output_dir / name for name in ("config.yaml", "metrics.jsonl", "model"))
    lines = read_metrics(metrics) if metrics.exists() else []
    if model.exists() and not settings.is_file():
        raise UserError(
            f"--output_dir {output_dir} holds a folder model/ but no config.yaml: it is not the folder of a run, and "
            "its model would be overwritten; name another folder"
        )
    stored = options.load(settings) if settings.is_file() else {}
    if stored and "output_dir" not in stored:
        raise UserError(f"{settings} was not written by a recipe and would be overwritten: name another folder")
    found = {"config": stored, "has_model": model.exists(), "data": None, "results": None}
    if not model.exists() or not lines or "train_runtime" not in lines[-1]:
        return found
    last = next((line for line in reversed(lines) if any(name.startswith("eval_") for name in line)), {})
    results = {name: float(value) for name, value in last.items() if name.startswith("eval_")}
    return found | {"data": data_of(lines), "results": results}


def refuse_another_run(
    stored: Mapping[str, Any], config: options.Options, where: Path | str, may_differ: Container[str] = ()
) -> None:
    """Refuse to resume from `where`, a folder, a checkpoint or a mirror, if settings that affect the result differ.

    Raises:
        UserError: shows the differences, how to resume, and how to begin a new run.
    """
    changed = {name: it for name, it in options.differences(stored, config).items() if name not in may_differ}
    if changed:
        raise UserError(
            f"{where} belongs to a run with other settings{in_words(changed)}: use the old values to resume "
            f"it, or {resuming.NEW_RUN}"
        )


def in_words(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """The result of `options.differences` as words in parentheses; "" for no difference."""
    words = [f"--{name} was {options.shown(old)}, is {options.shown(new)}" for name, (old, new) in changed.items()]
    return f" ({', '.join(words)})" if words else ""


def refuse_changed_data(accelerator: Any, progress: Progress, *datasets: Any) -> None:
    """Refuse data that have changed since the run began, and data that differ between the machines.

    Call it on every process. Each data set has a `digest()` of its content, which the checkpoints keep.

    Raises:
        UserError: a data set has no random access, `lengths`, `digest` or samples; the data differ between machines
            (names the machine); or the data have changed since the run began.
    """
    for data in datasets:
        if lacking := [name for name in ("__len__", "__getitem__", "lengths", "digest") if not hasattr(data, name)]:
            raise UserError(
                f"load_data returned a {type(data).__name__} without {', '.join(lacking)}: give it the attributes of "
                "InMemory in shared/plan/loading.py; store data that can only be read in sequence by "
                "save_to_disk first, because a run on them could not be resumed exactly"
            )
        if not len(data):
            raise UserError(f"load_data returned a {type(data).__name__} without samples: add some")
    everybody = gather(accelerator, (socket.gethostname(), [data.digest() for data in datasets]))
    main, digests = everybody[0]
    for rank, (host, theirs) in enumerate(everybody):
        if theirs != digests:
            raise UserError(
                f"rank {rank} on {host} has other data than rank 0 on {main}: copy the files, and install the same "
                "library versions"
            )
    if progress.data not in (None, digests):
        raise UserError(
            "the data have changed since this run began, or other library versions prepared them: restore them to "
            f"resume, or {resuming.NEW_RUN}"
        )
    progress.data = digests


def lock(output_dir: Path) -> None:
    """Make and lock the folder.

    Raises:
        UserError: the folder cannot be created or written, or another run has it.
    """
    with about("--output_dir cannot be written"):
        output_dir.mkdir(parents=True, exist_ok=True)
        folder_lock.acquire(output_dir)


def begin_run(accelerator: Any, config: options.Options, progress: Progress) -> None:
    """Write config.yaml and start the clock; called after every check that could refuse the run.

    metrics.jsonl is cut first: a finished run that is continued and dies here must not look finished.
    """
    progress.started = time.perf_counter()
    output_dir = Path(config.output_dir)

    def write() -> None:
        cut_metrics(output_dir / "metrics.jsonl", progress.step, progress.evaluation_owed)
        options.save(config, output_dir / "config.yaml")

    on_writers(accelerator, config, lambda: clean_up(output_dir))
    on_main_process(accelerator, write)


def clean_up(output_dir: Path) -> None:
    """Remove what an interrupted start left: its marker, and what it did not write to the end."""
    with signals.heard.removing:
        (output_dir / signals.MARKER).unlink(missing_ok=True)
    remove_unfinished(resuming.folder(output_dir), PARTIAL)
    remove_unfinished(output_dir)


def data_of(lines: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """The digests of a finished run's data, from the last line of its metrics.jsonl."""
    return str(lines[-1]["data"]).split() if lines and "data" in lines[-1] else None
