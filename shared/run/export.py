"""Exports the folder model/ of a run, complete or not at all."""

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shared.checkpoints.progress import Progress
from shared.checkpoints.states import distinct
from shared.config.options import Options
from shared.disk import remedy, remove_unfinished, usual_permissions
from shared.errors import UserError
from shared.processes.collectives import on_main_process

WEIGHTS = "model.safetensors"


class Export:
    """Writes any `nn.Module` as a state dict. A hook may give `run.export` a subclass when the run is `opened`."""

    def write(self, run: Any, model: Any, processor: Any) -> None:
        """Write `model/`: the weights, the processor's files, and those of the hooks.

        Call it on every process. `run` is the `TrainingRun`.

        Raises:
            UserError: the loss or a parameter is not finite, or the model could not be written.
        """
        config, progress, output_dir = run.config, run.progress, Path(run.config.output_dir)
        unwrapped = run.accelerator.unwrap_model(model)
        folders = self.begin(unwrapped)
        weights = run.strategy.weights(run.accelerator, model)

        def fill(folder: Path) -> None:
            self.save(unwrapped, weights, folder)
            if hasattr(processor, "save_pretrained"):
                processor.save_pretrained(folder)
            for hook in run.hooks:
                hook.saved(run, unwrapped, folder)

        def write() -> None:
            require_finite(config, progress, unwrapped, weights)
            try:
                for name, fill_folder in {**folders, "model": fill}.items():
                    write_folder(output_dir / name, fill_folder)
            except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, as three libraries report it
                raise UserError(
                    f"cannot write {output_dir / 'model'} ({error}): {remedy(error)} and start again; the run resumes "
                    "from its newest checkpoint"
                ) from None

        on_main_process(run.accelerator, write)

    def begin(self, model: Any) -> dict[str, Callable[[Path], object]]:
        """Prepare the model on every process; return the functions that fill other folders, by name."""
        return {}

    def save(self, model: Any, weights: dict[str, Tensor], folder: Path) -> None:
        """Write the state dict of a model, each of its tied weights once."""
        tensors = {name: tensor.contiguous() for name, tensor in distinct(weights).items()}
        save_file(tensors, folder / WEIGHTS, {"format": "pt"})


def write_folder(folder: Path, fill: Callable[[Path], object]) -> None:
    """Replace a folder, complete or not at all: `fill` writes the files of the new one."""
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        fill(partial)
        usual_permissions(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        remove_unfinished(folder.parent, f"{folder.name}.partial-*")  # also those of writers that were killed


def results_of(config: Options, progress: Progress) -> tuple[int, dict[str, float]]:
    """The step of the model that is exported, and the results of its evaluation."""
    if config.load_best_model_at_end and progress.best_step is not None:
        return progress.best_step, progress.best_results
    return progress.step, progress.results


def require_finite(config: Options, progress: Progress, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
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
