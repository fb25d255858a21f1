"""The folder a run leaves: opened, checked against what is already in it, and finished with the model in it."""

import dataclasses
import shlex
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError

from shared import checkpoints, lock, memory, options, own_models, signals
from shared.errors import UserError
from shared.hub import require_upload
from shared.launch import gather, on_main_process
from shared.machines import check_shared, on_writers
from shared.progress import Progress
from shared.tracking import cut_metrics, read_metrics, require_tracker

Config = TypeVar("Config", bound=options.Options)
CARD = "README.md"  # of a model


def open_run(accelerator: Any, config: Config) -> tuple[Config, Progress, Path | None]:
    """Look into `--output_dir`: the resolved config, the progress to go on from and its checkpoint, None at the start.

    Call it on every process; those that write look and tell the others. Nothing in the folder is changed yet, but it is
    locked for this run, whose `main` is `lock.released_after`.

    Raises:
        UserError: the folder cannot be written, is in use, holds a run that another config decided, or is not what
            --save_on_each_node says; the tracker is not installed, or the model could not be uploaded at the end.
    """
    output_dir = Path(config.output_dir)

    def look() -> dict[str, Any]:
        require_tracker(config.report_to)
        if config.push_to_hub:
            require_upload()
        settings, metrics, model = (output_dir / name for name in ("config.yaml", "metrics.jsonl", "model"))
        if metrics.exists():
            read_metrics(metrics)
        if model.exists() and not settings.is_file():
            raise UserError(
                f"--output_dir {output_dir} holds a folder model/ but no config.yaml: it is no run to go on with, and "
                "its model would be overwritten; name another folder"
            )
        stored = options.load(settings) if settings.is_file() else {}
        if stored and "output_dir" not in stored:
            raise UserError(f"{settings} was not written by a recipe and would be overwritten: name another folder")
        return {"config": stored, "finished": model.exists()}

    def lock_folder() -> None:
        check_writable(output_dir)
        lock.acquire(output_dir)

    on_writers(accelerator, config, lock_folder)
    check_shared(accelerator, config)
    left = on_main_process(accelerator, look)
    checkpoint, state = checkpoints.find(accelerator, config) or (None, left)
    stored = state["config"]
    if checkpoint is None and stored and not left["finished"]:
        changed = options.differences(stored, resolve(config, accelerator, None))
        accelerator.print(f"{output_dir} holds a run that left no checkpoint{shown(changed)}: this one takes its place")
        stored = None
    config = memory.resolve(resolve(config, accelerator, stored), stored)
    if stored:
        refuse_another_run(stored, config, checkpoint or output_dir)
    if checkpoint is None:
        return config, Progress(), None
    hardware = {"world_size": accelerator.num_processes, "threads": torch.get_num_threads()}
    for name, now in hardware.items():
        if state[name] != now:
            accelerator.print(f"{name} was {state[name]} when {checkpoint.name} was saved, is {now}: equal to rounding")
    return config, Progress.from_state(state), checkpoint


def check_writable(output_dir: Path) -> None:
    """Write and remove a file of 64 KiB.

    Raises:
        UserError: the folder cannot be made or written to, or its disk is full.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir) as probe:
            probe.write(bytes(1 << 16))
    except OSError as error:
        raise UserError(
            f"--output_dir {output_dir} cannot be written ({error.strerror}): name another folder, or free space there"
        ) from None


def resolve(config: Config, accelerator: Any, stored: Mapping[str, Any] | None) -> Config:
    """Settle what the launch decides: precision, and G if it is given by --gradient_accumulation_steps.

    G is derived once, at the first launch; a resumed run keeps it, whatever the number of processes now, and says so.

    Raises:
        UserError: G and the accumulation are both given and do not fit; shows the equation.
    """
    config = dataclasses.replace(config, mixed_precision=accelerator.mixed_precision)
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
                f"the run keeps the global batch of its first launch, {stored['global_batch_size']}, and not {equation}"
            )
        size = given or stored["global_batch_size"]  # another one given is refused, with all other differences
    elif given not in (None, size):
        raise UserError(
            f"--global_batch_size {given} is not {equation}: leave out one of --global_batch_size and "
            "--gradient_accumulation_steps"
        )
    return dataclasses.replace(config, global_batch_size=size, gradient_accumulation_steps=None)


def refuse_another_run(stored: Mapping[str, Any], config: options.Options, where: Path) -> None:
    """Refuse to go on with a run that other settings decided.

    Raises:
        UserError: shows the difference and both ways out.
    """
    if changed := options.differences(stored, config):
        raise UserError(
            f"{where} holds a run decided by other settings{shown(changed)}: give the old values to go on with it, or "
            "another --output_dir for a new run"
        )


def shown(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """What `options.differences` found, as words in brackets; nothing for no difference."""
    words = ", ".join(f"--{name} was {old}, is {new}" for name, (old, new) in changed.items())
    return f" ({words})" if words else ""


def same_data(accelerator: Any, progress: Progress, *datasets: Any) -> None:
    """Refuse other data than those of the run so far, and data that differ between the machines.

    Call it on every process. Each data set has a `digest()` of what is read from it, which the checkpoints keep.

    Raises:
        UserError: names the machine, or says that the data changed since the run began.
    """
    everybody = gather(accelerator, (socket.gethostname(), [data.digest() for data in datasets]))
    main, digests = everybody[0]
    for host, others in everybody:
        if others != digests:
            raise UserError(
                f"{host} has other data than {main}: copy the files, and install the same versions of the libraries"
            )
    if progress.data not in (None, digests):
        raise UserError(
            "the data are not those that this run began with, or have been prepared by other versions of the "
            "libraries: restore them to go on, or name another --output_dir for a new run"
        )
    progress.data = digests


def begin(accelerator: Any, config: options.Options, progress: Progress) -> None:
    """Write config.yaml and start the clock: everything that could refuse the run has been passed.

    metrics.jsonl is cut first, so that a run that was made longer and dies here does not look finished.
    """
    progress.started = time.perf_counter()
    output_dir = Path(config.output_dir)

    def clean_up() -> None:
        signals.remove_marker(output_dir)
        checkpoints.remove_partials(output_dir)

    def write() -> None:
        cut_metrics(output_dir / "metrics.jsonl", progress.step)
        options.save(config, output_dir / "config.yaml")

    on_writers(accelerator, config, clean_up)
    on_main_process(accelerator, write)


def finished(accelerator: Any, config: options.Options) -> dict[str, float] | None:
    """The last evaluation of a finished run: its model is there, and the config does not make the run longer.

    Call it on every process; the main one looks and tells the others.
    """
    output_dir = Path(config.output_dir)

    def look() -> dict[str, float] | None:
        exported = any((output_dir / "model" / name).is_file() for name in ("config.json", CARD))
        if not exported or not (output_dir / "metrics.jsonl").is_file():
            return None
        lines = read_metrics(output_dir / "metrics.jsonl")
        stored = options.load(output_dir / "config.yaml")
        grown = any(stored[name] != getattr(config, name) for name in config.MAY_GROW)
        if not lines or "train_runtime" not in lines[-1] or grown:
            return None
        signals.remove_marker(output_dir)
        last = next(line for line in reversed(lines) if "eval_loss" in line)
        return {name: float(value) for name, value in last.items() if name.startswith("eval_")}

    return on_main_process(accelerator, look)


def export(accelerator: Any, config: options.Options, progress: Progress, model: Any, processor: Any) -> None:
    """Write `model/`, complete or not at all: weights in full, config, tokenizer or image processor, model card.

    A model that is any `nn.Module`, without a `save_pretrained`, has no config; the card says how to load it.
    Call it on every process; under FSDP the weights are gathered. With --push_to_hub it is uploaded as well.

    Raises:
        UserError: it could not be written, or not be uploaded.
    """
    from transformers.utils import logging

    output_dir = Path(config.output_dir)
    weights, trained = accelerator.get_state_dict(model), accelerator.unwrap_model(model)

    def write() -> None:
        try:
            write_folder()
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, by three libraries
            raise UserError(
                f"cannot write {output_dir / 'model'} ({error}): free space and start again, which goes on from the "
                "newest checkpoint"
            ) from None
        if config.push_to_hub:
            print(f"uploaded to {push(output_dir / 'model', config)}")

    def write_folder() -> None:
        logging.disable_progress_bar()  # a bar for one file
        partial = Path(tempfile.mkdtemp(prefix="model.partial-", dir=output_dir))
        try:
            own_models.save(trained, weights, partial)
            if hasattr(processor, "save_pretrained"):
                processor.save_pretrained(partial)
            (partial / CARD).write_text(model_card(config, progress, trained))
            partial.chmod(0o755)  # mkdtemp keeps others out
            shutil.rmtree(output_dir / "model", ignore_errors=True)
            partial.rename(output_dir / "model")
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    on_main_process(accelerator, write)


def model_card(config: options.Options, progress: Progress, model: Any = None) -> str:
    """The README.md of an exported model: what it is, its numbers, and the command that made it."""
    own = model is not None and own_models.is_own(model)
    step, results = progress.step, progress.results
    if config.load_best_model_at_end and progress.best_step is not None:
        step, results = progress.best_step, progress.best_results
    rows = "\n".join(f"| {name.removeprefix('eval_')} | {value:.4f} |" for name, value in results.items())
    base = getattr(config, "model_name_or_path", None)
    data = config.dataset_name or config.train_file or getattr(config, "train_dir", None) or "the embedded data"
    return "\n".join(
        [
            "---",
            *([] if own else ["library_name: transformers"]),
            "tags: [accelerate-recipes]",
            *([f"base_model: {base}"] if base and not Path(base).exists() else []),  # the Hub knows no folders
            "---",
            "",
            f"# {config.run_name or Path(config.output_dir).resolve().name}",
            "",
            f"Trained with accelerate-recipes on {data}: {step} steps of {config.global_batch_size} samples, seed "
            f"{config.seed}.",
            "",
            "| metric on the validation data | value |",
            "|---|---|",
            rows,
            "",
            *([own_models.how_to_load(model)] if own else []),
            "Command:",
            "",
            f"    {shlex.join(sys.argv)}",
            "",
        ]
    )


def push(model_folder: Path, config: options.Options) -> str:
    """Upload `model/` to the Hub as --hub_model_id, by default the name of the output folder; returns its address.

    Raises:
        UserError: the Hub did not take it; the model stays where it is.
    """
    from huggingface_hub import HfApi

    name = config.hub_model_id or model_folder.resolve().parent.name
    try:
        api = HfApi()
        name = api.create_repo(name, exist_ok=True).repo_id
        commit = "Train with accelerate-recipes"
        return str(api.upload_folder(folder_path=model_folder, repo_id=name, commit_message=commit))
    except Exception as error:  # of a dozen kinds; none of them may cost the model, which is complete
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"--push_to_hub: {name} could not be uploaded ({reason}), and the model is in {model_folder}: start again "
            "to try it once more, or without the flag"
        ) from None
