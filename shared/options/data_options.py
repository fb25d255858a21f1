"""The settings of shared/extras, of data, of models of transformers and of metrics, besides those of `Options`."""

import glob
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from shared.checkpoints.resuming import NEW_RUN
from shared.config.fields import Limits, Meaning, fields_with
from shared.config.options import Options, Rule, plain
from shared.disk import is_url
from shared.errors import UserError, count_of
from shared.extras.costs import Costs, Profiler
from shared.extras.flops import Mfu
from shared.extras.gradient_compression import GradientCompression
from shared.extras.hub import ModelCard, Upload
from shared.extras.trackers import Trackers
from shared.fsdp.strategy import RULES as RULES_OF_FSDP
from shared.fsdp.strategy import Sharding
from shared.models.optimizers import DecayFrom, step_of
from shared.models.trainable import FreezeUnreached, Frozen, WeightAverage
from shared.models.transformers_models import Pretrained
from shared.monitoring.hooks import Hook
from shared.remote.mirror import Mirror
from shared.report.page import Report

TrackerName = Literal["none", "wandb", "tensorboard", "trackio"]
MODEL = "model_name_or_path"
# Files of a model's folder that matter also when the weights come from a checkpoint. The tokenizer affects the data,
# whose digest covers it.
MODEL_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, kw_only=True)
class ExtraOptions(Options):
    """Settings of what a run can do besides training, and another way to give the global batch."""

    global_batch_size: int | None = 32  # type: ignore[assignment]
    """Samples per optimizer step, over all processes and micro-batches; does not depend on the number of processes."""
    gradient_accumulation_steps: Annotated[int | None, Meaning.NOT_IN_RESULT] = None
    """Instead of --global_batch_size: the first launch sets it to --per_device_train_batch_size x processes x this."""
    decay_from: str | None = None
    """Begin with this checkpoint of another run, and decay from its step to the last one. None: a run of its own."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Number format of gradients sent between processes; 16 bits halve the traffic. No effect with one process."""
    report_to: Annotated[tuple[TrackerName, ...], Meaning.NOT_IN_RESULT] = ("none",)
    """One or more experiment trackers, in addition to metrics.jsonl."""
    peak_tflops: Annotated[float | None, Limits(above=0), Meaning.NOT_IN_RESULT, Meaning.MAY_DIFFER] = None
    """Peak speed of one device in TFLOP/s, from which mfu is computed. None: measured at the start."""
    profile: Annotated[int | None, Meaning.NOT_IN_RESULT] = None
    """Profile this many steps, after two warm-up steps: profile/ gets a trace and the ten most expensive operators."""
    mirror_checkpoints: Annotated[str | None, Meaning.NOT_IN_RESULT] = None
    """URL (s3://bucket/folder) to which checkpoints are copied. A start on an empty machine loads the newest one."""
    push_to_hub: Annotated[bool, Meaning.NOT_IN_RESULT] = False
    """Upload model/ to the Hub at the end, also that of a run that has finished before."""
    hub_model_id: Annotated[str | None, Meaning.NOT_IN_RESULT] = None
    """Repository for --push_to_hub. None: the name of --output_dir, in your own account."""

    ALTERNATIVES: ClassVar = (
        *Options.ALTERNATIVES,
        ("global_batch_size", "gradient_accumulation_steps"),
        ("decay_ratio", "decay_from"),
    )
    NEEDS: ClassVar = (
        *Options.NEEDS,
        ("gradient_accumulation_steps", "per_device_train_batch_size"),
        ("hub_model_id", "push_to_hub"),
        ("decay_from", "lr_scheduler_type", "warmup_stable_decay"),
    )
    EXCLUDES: ClassVar = (*Options.EXCLUDES, ("decay_ratio", "decay_from"))
    RULES: ClassVar[tuple[Rule, ...]] = RULES_OF_FSDP  # instead of the rule of `Options`, which refuses FSDP

    @property
    def decay_start(self) -> int | None:
        return step_of(self.decay_from) if self.decay_from else None

    def check_values(self) -> None:
        super().check_values()
        if self.global_batch_size is None and self.gradient_accumulation_steps is None:
            raise UserError("--global_batch_size None: give a number, or --gradient_accumulation_steps instead")
        if self.decay_from:
            step_of(self.decay_from)

    def settled(self, accelerator: Any, stored: Mapping[str, Any] | None) -> Self:
        """As in the base class, with the global batch that --gradient_accumulation_steps gives at the first launch.

        A line is printed if it gives another one at a later launch.

        Raises:
            UserError: --global_batch_size and --gradient_accumulation_steps contradict each other; shows the equation.
        """
        config = super().settled(accelerator, stored)
        steps, rows, given = self.gradient_accumulation_steps, self.per_device_train_batch_size, self.global_batch_size
        if steps is None or rows is None:
            return config
        processes = count_of(accelerator.num_processes, "process", "processes")
        size = rows * accelerator.num_processes * steps
        equation = f"{rows} per device x {processes} x {steps} accumulation steps = {size}"
        if stored:
            if size != (first := stored["global_batch_size"]):
                accelerator.print(f"the run keeps the global batch of its first launch, {first}, not {equation}")
            size = given or first  # `refuse_another_run` refuses a changed value
        elif given not in (None, size):
            raise UserError(
                f"--global_batch_size {given} is not {equation}: leave out one of --global_batch_size and "
                "--gradient_accumulation_steps"
            )
        return replace(config, global_batch_size=size, gradient_accumulation_steps=None)

    def hooks(self) -> list[Hook]:
        # Profiles and mirrors are closed before trackers, whose uploads may take longer than a scheduler allows.
        return [
            *super().hooks(),
            FreezeUnreached(),
            Sharding(),
            GradientCompression(),
            Mfu(),
            Costs(),
            ModelCard(),
            *([DecayFrom()] if self.decay_from else []),
            *([Profiler()] if self.profile else []),
            *([Mirror()] if self.mirror_checkpoints else []),
            *([Upload()] if self.push_to_hub else []),
            Report(),
            Trackers(),
        ]


@dataclass(frozen=True, kw_only=True)
class DataOptions(ExtraOptions):
    """Settings of data from files, folders and the Hub. The loaders in shared/datasets and shared/images read them."""

    dataset_name: Annotated[str | None, Meaning.NAMES_DATA, Meaning.MAY_BE_ON_HUB] = None
    """Dataset on the Hub, or a folder written by save_to_disk. None: --train_file, or the recipe's default data."""
    dataset_config_name: str | None = None
    """Configuration of --dataset_name, such as mrpc for nyu-mll/glue. None: its default one."""
    train_split_name: str | None = None
    """Training split of --dataset_name. None: train, or training."""
    validation_split_name: str | None = None
    """Validation split of --dataset_name. None: the first that exists of validation, valid, val, dev, eval, test."""
    train_file: Annotated[tuple[str, ...] | None, Meaning.NAMES_DATA] = None
    """Your own training data, instead of --dataset_name: files, 'patterns/*.csv' or folders, sorted by name."""
    validation_file: Annotated[tuple[str, ...] | None, Meaning.NAMES_DATA] = None
    """Validation data for --train_file. None: --validation_split_percentage of the training data."""
    csv_delimiter: str | None = None
    """Column separator of .csv and .tsv files, such as ';'. None: a comma in .csv files, a tab in .tsv files."""
    validation_split_percentage: Annotated[int, Limits(least=1, most=99)] = 10
    """Percentage of the training data held out for validation, if there is no validation or test split."""
    skip_incomplete_rows: bool = False
    """Skip rows without text, image or label, and print how many. Otherwise such a row is an error."""
    max_train_samples: int | None = None
    """Train on a random subset of this many rows, which depends on --seed. None: all rows."""
    max_eval_samples: int | None = None
    """Validate on a random subset of this many rows, which depends on --seed. None: all rows."""

    NEEDS: ClassVar = (
        *ExtraOptions.NEEDS,
        ("dataset_config_name", "dataset_name"),
        ("train_split_name", "dataset_name"),
        ("validation_split_name", "dataset_name"),
        ("validation_file", "train_file"),
        ("csv_delimiter", "train_file"),
    )
    EXCLUDES: ClassVar = (*ExtraOptions.EXCLUDES, ("dataset_name", "train_file"))

    def moved(self, state: Mapping[str, Any], model: str | None) -> dict[str, tuple[str, str]]:
        """As in the base class: their content is compared instead of the path.

        If the run has a digest of its data, `refuse_changed_data` compares it. Of a model, the digest of its config is
        compared; its weights come from the checkpoint, which has a digest of the frozen ones. Two names of the same
        path are always equal.

        Raises:
            UserError: the config in the model's folder has changed.
        """
        result, before = {}, state.get("model")
        for name in sorted({*fields_with(type(self), Meaning.NAMES_DATA), MODEL}):
            old, new = state["config"].get(name), plain(self).get(name)
            if not old or not new or not (is_url(str(new)) or all(path.exists() for path in places(new))):
                continue
            same = [path.resolve() for path in places(old)] == [path.resolve() for path in places(new)]
            unchanged = before == model is not None if name == MODEL else state.get("data") is not None
            if old != new and (same or unchanged):
                result[name] = old, new
            if name == MODEL and old == new and None not in (before, model) and before != model:
                raise UserError(
                    f"--{MODEL} {new}: its config has changed since this run began: restore it to resume, or {NEW_RUN}"
                )
        return result

    def check_values(self) -> None:
        super().check_values()
        mark = "," if self.csv_delimiter is None else self.csv_delimiter
        if mark != r"\t" and not (len(mark) == 1 and mark.isascii() and mark not in '"\r\n'):
            raise UserError(f"--csv_delimiter {mark!r}: must be one character such as ';', or '\\t' for a tab")
        if empty := [name for name in fields_with(type(self), Meaning.NAMES_DATA) if getattr(self, name) == ()]:
            raise UserError(f"--{min(empty)} [] names no file: name one, or leave it out")


def missing_compiler(it: Any) -> str:
    """The compiler that --torch_compile needs and this machine lacks, with the fix; "" if it lacks none."""
    variable, usual = ("CXX", "g++") if it.on_cpu else ("CC", "gcc")
    name = it.env.get(variable, "").strip() or usual
    found = not it.config.torch_compile or shutil.which(name.split()[0])
    return "" if found else f"{name}: install it, or name another one in {variable}"


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DataOptions):
    """Settings of models of transformers. `adapt_to_device` and `build_model` of a recipe apply them."""

    model_name_or_path: Annotated[str | None, Meaning.MAY_BE_ON_HUB] = None
    """Pretrained model on the Hub or in a local folder. None: a new one with the sizes below."""
    revision: str | None = None
    """Branch, tag or commit of --model_name_or_path on the Hub. None: its main branch."""

    layer_lr_decay: Annotated[float, Limits(above=0, most=1)] | None = None
    """Factor between the learning rates of a layer and the one above it; the head has the full one. None: all equal."""
    freeze: tuple[str, ...] | None = None
    """Modules or parameters that keep their weights, such as embeddings or 'layers.[0-5]'. None: all are trained."""
    ema_decay: Annotated[float, Limits(above=0, below=1)] | None = None
    """Evaluate and export a moving average of the weights with this decay per step. None: no average."""

    activation_dtype: Literal["bf16"] | None = None
    """Number format of activations, without autocast; weights stay float32. None: given by --mixed_precision."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: saves memory, takes about a third more time."""
    torch_compile: bool = False
    """Compile the repeated layers of the model: faster steps on a GPU, a slower start, different rounding."""

    LEARNING_RATES: ClassVar[tuple[float, float]] = (5e-5, 5e-5)
    """The default of --learning_rate for new weights, and for pretrained ones."""

    NEEDS: ClassVar = (*DataOptions.NEEDS, ("revision", "model_name_or_path"))
    RULES: ClassVar[tuple[Rule, ...]] = (
        *DataOptions.RULES,
        Rule(
            lambda it: it.precision != "no" and it.config.activation_dtype,
            "--activation_dtype {found} computes without autocast, but mixed_precision is {it.precision}: add "
            "--mixed_precision no, or leave it out",
        ),
        Rule(missing_compiler, "--torch_compile needs a compiler, and there is no {found}"),
    )

    def model_digest(self) -> str | None:
        """A digest of MODEL_FILES in a local --model_name_or_path; None without one or for a model on the Hub."""
        name = self.model_name_or_path
        if name is None or not Path(name).is_dir():
            return None
        content = hashlib.sha256()
        for file in MODEL_FILES:
            if (path := Path(name) / file).is_file():
                content.update(f"{file} {path.stat().st_size} ".encode() + path.read_bytes())
        return content.hexdigest()

    def default_learning_rate(self) -> float:
        """That of new or of pretrained weights."""
        return self.LEARNING_RATES[self.model_name_or_path is not None]

    def hooks(self) -> list[Hook]:
        """As in the base class, after those that freeze parameters, choose the export, and average weights."""
        frozen = [Frozen(self.freeze)] if self.freeze else []
        average = [] if self.ema_decay is None else [WeightAverage(self.ema_decay)]
        return [*frozen, Pretrained(), *average, *super().hooks()]


@dataclass(frozen=True, kw_only=True)
class MetricOptions(ModelOptions):
    """Settings of the metrics, which `resolve_metrics` reads (shared/metrics/task_metrics.py)."""

    metric_name: Annotated[tuple[str, ...] | None, Meaning.CHOOSES_MODEL] = None
    """Metrics of the validation data, the main one first: shipped, a file, or on the Hub. None: those of the task."""
    positive_label: Annotated[str | None, Meaning.CHOOSES_MODEL] = None
    """Class of the metrics precision_of_class, recall_of_class and f1_of_class. None: the second of two classes."""
    trust_remote_code: Annotated[bool, Meaning.NOT_IN_RESULT] = False
    """Allow a --metric_name from the Hub to run its code on this machine."""

    NEEDS: ClassVar = (*ModelOptions.NEEDS, ("positive_label", "metric_name"))


def places(names: str | Sequence[str]) -> list[Path]:
    """The paths that a setting names: a path, a list of paths, or those that match a pattern such as data/*.csv."""
    each = [names] if isinstance(names, str) else names
    return [Path(path) for name in each for path in (sorted(glob.glob(name, recursive=True)) or [name])]  # noqa: PTH207
