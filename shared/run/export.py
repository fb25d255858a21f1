"""Exports the folder model/ of a run: weights, config, tokenizer or image processor, a model card; and adapter/."""

import dataclasses
import math
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shared.checkpoints.progress import Progress
from shared.checkpoints.states import distinct
from shared.config import options
from shared.config.fields import Meaning, fields_with
from shared.disk import remedy, usual_permissions
from shared.errors import UserError, count_of
from shared.processes.collectives import on_main_process

CARD = "README.md"  # the file name of a model card


def export(
    accelerator: Any,
    config: options.Options,
    progress: Progress,
    model: Any,
    processor: Any,
    notes: Sequence[str] = (),
) -> None:
    """Write `model/`, complete or not at all: all weights, config, tokenizer or image processor, model card.

    The card contains `notes` as paragraphs. A model without `save_pretrained` (any `nn.Module`) is written without a
    config, and its card explains how to load it.

    A model with adapters (--lora_rank) has a function `merge_adapters`, which merges them into its weights. `adapter/`
    then has them unmerged, as PEFT reads them, with the head of a classifier.

    Call it on every process; under FSDP the weights are gathered.

    Raises:
        UserError: the loss or a parameter is not finite, or the model could not be written.
    """
    from transformers.utils import logging

    output_dir = Path(config.output_dir)
    unwrapped = accelerator.unwrap_model(model)
    adapter = unwrapped.merge_adapters(unwrapped) if hasattr(unwrapped, "merge_adapters") else None
    weights = tied(unwrapped, accelerator.get_state_dict(model))

    def write() -> None:
        require_finite(config, progress, unwrapped, weights)
        logging.disable_progress_bar()  # it would be a bar for a single file
        try:
            if adapter:
                write_folder(output_dir / "adapter", adapter.save)
            write_folder(output_dir / "model", fill)
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, as three libraries report it
            raise UserError(
                f"cannot write {output_dir / 'model'} ({error}): {remedy(error)} and start again; the run resumes from "
                "its newest checkpoint"
            ) from None

    def fill(folder: Path) -> None:
        save(unwrapped, weights, folder)
        check_loads(folder, unwrapped)
        if hasattr(processor, "save_pretrained"):
            processor.save_pretrained(folder)
        (folder / CARD).write_text(model_card(config, progress, unwrapped, notes))

    on_main_process(accelerator, write)


def write_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Replace a folder, complete or not at all: `fill` writes the files of the new one."""
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        fill(partial)
        usual_permissions(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def tied(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """`weights` with one tensor under all names of a tied parameter; FSDP gathers one for each name."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    return {name: weights[names.get(name, name)] for name in weights}


def results_of(config: options.Options, progress: Progress) -> tuple[int, dict[str, float]]:
    """The step of the model that is exported, and the results of its evaluation."""
    if config.load_best_model_at_end and progress.best_step is not None:
        return progress.best_step, progress.best_results
    return progress.step, progress.results


def require_finite(
    config: options.Options, progress: Progress, model: torch.nn.Module, weights: Mapping[str, Tensor]
) -> None:
    """Refuse to export a model whose loss or parameters are not finite; buffers may contain infinities, such as masks.

    Raises:
        UserError: names the loss or the parameter, and how to train again.
    """
    step, results = results_of(config, progress)
    buffers = dict(model.named_buffers())
    bad = [name for name, tensor in weights.items() if name not in buffers and not tensor.isfinite().all()]
    loss = results.get("eval_loss", 0.0)
    problem = f"its parameter {bad[0]} is not finite" if bad else f"its evaluation loss is {loss}"
    if bad or not math.isfinite(loss):
        raise UserError(
            f"the model of step {step} is not exported, because {problem}: lower --learning_rate, or use "
            "--mixed_precision bf16 or no, in another --output_dir"
        )


def model_card(config: options.Options, progress: Progress, model: Any = None, notes: Sequence[str] = ()) -> str:
    """The README.md of an exported model: its training, `notes`, its metrics, and the command that trained it."""
    own = model is not None and is_own(model)
    step, results = results_of(config, progress)
    rows = "\n".join(f"| {name.removeprefix('eval_')} | {value:.4f} |" for name, value in results.items())
    base = getattr(config, "model_name_or_path", None)
    names_of_data = fields_with(type(config), Meaning.NAMES_DATA)
    named = [getattr(config, field.name) for field in dataclasses.fields(config) if field.name in names_of_data]
    data = next((options.shown(value) for value in named if value), "the embedded data")
    return "\n".join(
        [
            "---",
            *([] if own else ["library_name: transformers"]),
            "tags: [accelerate-recipes]",
            *([f"base_model: {base}"] if base and not Path(base).exists() else []),  # a name on the Hub
            "---",
            "",
            f"# {config.run_name or Path(config.output_dir).resolve().name}",
            "",
            f"Trained with accelerate-recipes on {data}: {count_of(step, 'step')} of {config.global_batch_size} "
            f"samples, seed {config.seed}.",
            "",
            *(line for note in notes for line in (note, "")),
            "| metric on the validation data | value |",
            "|---|---|",
            rows,
            "",
            *([how_to_load(model)] if own else []),
            "Command:",
            "",
            f"    {shlex.join(sys.argv)}",
            "",
        ]
    )


WEIGHTS = "model.safetensors"


def save(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a model with its `save_pretrained`, or its state dict as safetensors if it has no such method."""
    if is_own(model):
        tensors = {name: tensor.contiguous() for name, tensor in distinct(weights).items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    else:
        model.save_pretrained(folder, state_dict=weights)


def is_own(model: Any) -> bool:
    """Whether a model has no `save_pretrained`, so that only the code that builds it can load it."""
    return not hasattr(model, "save_pretrained")


def how_to_load(model: nn.Module) -> str:
    """The section of the model card on loading a model without `save_pretrained`."""
    return "\n".join(
        [
            f"`{WEIGHTS}` holds the state dict of a {type(model).__name__}, which `build_model` of the recipe builds:",
            "",
            "    from safetensors.torch import load_model",
            f'    load_model(model, "{WEIGHTS}")',
            "",
        ]
    )


def check_loads(folder: Path, model: torch.nn.Module) -> None:
    """Check that transformers can load the model in `folder`; no memory for its weights, 0.1 s for BERT base.

    Only transformers knows which names it writes, which it omits because they are tied, and which it reads. A model
    that is not a `PreTrainedModel` is not checked.

    Raises:
        UserError: the files lack a weight of the model, or contain one that the model does not have.
    """
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel
    from transformers.utils import logging

    if not isinstance(model, PreTrainedModel):
        return
    # fully_shard puts a class of its own before the model's class in the order of bases.
    own: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # it would print a table of all names
    try:
        _, found = own.from_pretrained(folder, device_map="meta", output_loading_info=True, local_files_only=True)
    finally:
        logging.set_verbosity(verbosity)
    wrong = {kind: sorted(map(str, found[f"{kind}_keys"])) for kind in ("missing", "unexpected", "mismatched")}
    if any(wrong.values()):
        counts = ", ".join(f"{len(names)} {kind} ({names[0]})" for kind, names in wrong.items() if names)
        raise UserError(
            f"the exported model would not load with the weights that were trained ({counts}): build_model must return "
            "the model as transformers makes it; model/ was not written, and the checkpoints are kept"
        )
