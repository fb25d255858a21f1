"""The fields every recipe's Config has, the command line made from them, and what of them a resumed run may change."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from shared.config import command_line
from shared.config.limits import CanBeZero, Limits, Share, limits_of, problem_with
from shared.errors import UserError

ScheduleType = Literal["linear", "cosine", "constant", "polynomial", "warmup_stable_decay"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What every recipe can be told. A recipe subclasses this, adds its own fields and sets its own defaults.

    Every field has a default and a docstring, which is its --help. A number has its limits in its type; without any, a
    whole number is at least 1, another one at least 0. A field decides the run, so that a resumed run must
    have the same value, unless one of the sets at the end of the class names it.
    """

    # Model
    revision: str | None = None
    """Branch, tag or commit of --model_name_or_path on the Hub. None: its main branch."""

    # Data
    dataset_name: str | None = None
    """Data set on the Hub, or a folder written by save_to_disk. None: the recipe's embedded data, or --train_file."""
    dataset_config_name: str | None = None
    """Configuration of --dataset_name, such as mrpc for nyu-mll/glue."""
    train_split_name: str | None = None
    """The split of --dataset_name to train on. None: train, or training."""
    validation_split_name: str | None = None
    """The split of --dataset_name to validate on. None: validation, valid, val, dev or eval, or else test."""
    train_file: tuple[str, ...] | None = None
    """Training data of your own, instead of --dataset_name: files, 'patterns/*.csv' or folders, in order of names."""
    validation_file: tuple[str, ...] | None = None
    """Validation data that goes with --train_file. None: --validation_split_percentage of the training data."""
    csv_delimiter: str | None = None
    """What separates the columns of .csv and .tsv files, such as ';'. None: a comma, and a tab in .tsv files."""
    validation_split_percentage: Annotated[int, Limits(least=1, most=99)] = 10
    """Share of the training data held out for validation, in percent, where there is no validation or test part."""
    skip_incomplete_rows: bool = False
    """Leave out rows whose text, image or label is missing, and say how many. Else the first of them ends the run."""
    max_train_samples: int | None = None
    """Train on that many rows only, chosen by --seed from all of them. None: on all."""
    max_eval_samples: int | None = None
    """Validate on that many rows only, chosen by --seed from all of them. None: on all."""
    dataloader_num_workers: CanBeZero | None = None
    """Loader worker processes beside each training process. None: 2 with an accelerator, 0 on a CPU."""

    # Batches
    global_batch_size: int | None = 32
    """Samples per optimizer step, over all processes and micro-batches: the same run on any number of processes."""
    gradient_accumulation_steps: int | None = None
    """Instead of --global_batch_size: the first launch makes it --per_device_train_batch_size x processes x this."""
    per_device_train_batch_size: int | None = None
    """Most samples of one micro-batch. None: no such limit."""
    auto_micro_batch: bool = False
    """Find the largest micro-batch that the GPUs' memory holds, before training; a resumed run keeps what was found."""
    micro_batches_per_step: int | None = None
    """Micro-batches a global batch is cut into. None: the smallest of 1, 2, 4, 8, 16, 24, ... within the limits."""

    # Optimization
    optim: Literal["adamw", "sgd"] = "adamw"
    """Optimizer."""
    learning_rate: Annotated[float, Limits(above=0)] | None = 5e-5
    """Peak learning rate, reached after the warm-up."""
    adam_beta1: Annotated[float, Limits(least=0, below=1)] | None = None
    """Share of AdamW's mean of gradients that stays at each step. None: 0.9."""
    adam_beta2: Annotated[float, Limits(least=0, below=1)] | None = None
    """Share of AdamW's mean of squared gradients that stays at each step. None: 0.999, in muon 0.95."""
    adam_epsilon: Annotated[float, Limits(above=0)] | None = None
    """Added to the root of that mean, by which AdamW divides. None: 1e-8, in muon 1e-10."""
    weight_decay: float = 0.01
    """Weight decay, with adamw decoupled; biases and norms have none."""
    num_train_epochs: int = 3
    """Passes over the training data."""
    max_train_steps: int | None = None
    """Optimizer steps, instead of --num_train_epochs. None: as many as the epochs need."""
    lr_scheduler_type: ScheduleType = "linear"
    """Shape of the learning rate after the warm-up. Only under constant can a finished run be made longer."""
    decay_ratio: Share | None = None
    """Share of all optimizer steps over which warmup_stable_decay goes to 0 at the end. None: 0.2."""
    warmup_steps: CanBeZero | None = None
    """Optimizer steps over which the learning rate rises from 0 to its peak. None: as --warmup_ratio says, or none."""
    warmup_ratio: Share | None = None
    """Instead of --warmup_steps: the share of all optimizer steps, from 0 to 1."""
    max_grad_norm: float = 1.0
    """Gradients with a larger norm (L2, over all parameters) are scaled down to it. 0: no clipping."""

    # Precision
    mixed_precision: Literal["launcher", "no", "fp16", "bf16"] = "launcher"
    """Precision of the forward and backward passes. launcher: as accelerate launch says. Weights stay float32."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    torch_compile: bool = False
    """Compile the model's repeated layers: faster steps on a GPU after a slower start, and other rounding."""
    gradient_compression: Literal["none", "bf16", "fp16"] = "none"
    """Format in which gradients travel between processes: half the bytes, for slow links. One process sends none."""
    deterministic: bool = False
    """Only deterministic kernels: bit-identical runs on a GPU too, but slower."""
    seed: CanBeZero = 0
    """Decides initial weights, order of samples, dropout, masking and augmentation."""

    # The run
    output_dir: str = "out"
    """Folder of the run: config.yaml, metrics.jsonl, curves.png, checkpoints/, model/."""
    resume_from_checkpoint: str = "auto"
    """auto: from the newest intact checkpoint in --output_dir, if there is one. never: from the start. Or a PATH."""
    checkpointing_steps: str = "epoch"
    """Save every so many steps. epoch: at the first that completes an epoch. no: only when interrupted or stopped."""
    save_total_limit: int | None = 3
    """Checkpoints kept, besides the best one. None: all."""
    save_on_each_node: bool = False
    """Each machine keeps checkpoints of its own, in an --output_dir that the machines do not share."""
    eval_steps: int | None = None
    """Evaluate at every that many optimizer steps. None: at the first step that completes an epoch."""
    logging_steps: int = 10
    """Log at every that many optimizer steps."""
    metric_name: tuple[str, ...] | None = None
    """Metrics of the evaluate library to compute on the validation data, the main one first. None: as fits the task."""
    positive_label: str | None = None
    """Class that precision_of_class, recall_of_class and f1_of_class are about. None: the second of two classes."""
    trust_remote_code: bool = False
    """Allow a --metric_name from the Hub to run its code on this machine."""
    load_best_model_at_end: bool = False
    """Write the best evaluated model to model/, not the last. Needs --metric_for_best_model."""
    metric_for_best_model: str | None = None
    """Evaluation number that tells which model is best, such as accuracy or loss."""
    greater_is_better: bool | None = None
    """Whether a larger --metric_for_best_model is better. None: yes, unless its name has loss, error or the like."""
    early_stopping_patience: int | None = None
    """End the run after that many evaluations in a row without a better one. None: never."""
    report_to: tuple[Literal["none", "wandb", "tensorboard", "trackio"], ...] = ("none",)
    """Experiment tracker, or several of them, besides metrics.jsonl."""
    peak_tflops: Annotated[float, Limits(above=0)] | None = None
    """Most that a processor can do, in 10^12 operations per second, for the figure mfu. None: measured at the start."""
    profile: int | None = None
    """Profile that many steps, after two of warm-up, into profile/: a trace and the ten most expensive operators."""
    run_name: str | None = None
    """Name of the run in the tracker and the model card. None: the name of --output_dir."""
    push_to_hub: bool = False
    """Upload model/ to the Hub at the end."""
    hub_model_id: str | None = None
    """Repository that --push_to_hub uploads to. None: the name of --output_dir, under your own account."""
    expect_processes: int | None = None
    """Refuse to start with another number of processes: some launchers silently start one. None: any number."""
    dry_run: bool = False
    """Prepare everything, print what would run, and end before the first step."""

    def __post_init__(self) -> None:
        """In Python, lists and single values of fields that hold several become tuples, as they do in a YAML file."""
        config_class: type = type(self)
        for name in command_line.tuple_fields(config_class):
            if (value := getattr(self, name)) is not None and not isinstance(value, tuple):
                object.__setattr__(self, name, tuple(value) if isinstance(value, list) else (value,))

    # How they are treated. A subclass that adds fields may extend these.
    LEARNING_RATES: ClassVar[tuple[float, float]] = (5e-5, 5e-5)
    """What --learning_rate None means, for new weights and for pretrained ones that are trained further."""

    NAMES_DATA: ClassVar = frozenset({"dataset_name", "train_file", "validation_file", "train_dir", "validation_dir"})
    """Fields, of any recipe, that name data by a path or on the Hub."""

    SIZES_OF_NEW_MODELS: ClassVar[frozenset[str]] = frozenset()
    """Fields without effect on the model that --model_name_or_path names."""

    NEVER_MATTERS: ClassVar[frozenset[str]] = frozenset(
        {
            "gradient_accumulation_steps",  # the global batch decides, and the first launch has derived it
            "auto_micro_batch",  # the budget decides, and the first launch has found it
            "dataloader_num_workers",
            "output_dir",
            "resume_from_checkpoint",
            "checkpointing_steps",
            "save_total_limit",
            "save_on_each_node",
            "logging_steps",
            "report_to",
            "peak_tflops",
            "profile",
            "run_name",
            "push_to_hub",
            "hub_model_id",
            "trust_remote_code",
            "expect_processes",
            "dry_run",
        }
    )
    """Fields that change nothing that is trained."""

    MAY_DIFFER: ClassVar[frozenset[str]] = frozenset({"dataloader_num_workers", "expect_processes", "peak_tflops"})
    """Fields that each process of a launch may have its own value of. Any other must be the same on all, even one that
    never matters: processes that save or log at different steps would wait for each other in different calls."""

    CHOOSES_THE_MODEL: ClassVar[frozenset[str]] = frozenset(
        {
            "load_best_model_at_end",
            "early_stopping_patience",
            "eval_steps",
            "metric_name",
            "positive_label",
            "metric_for_best_model",
            "greater_is_better",
        }
    )
    """Fields that decide only where evaluations choose the weights that are kept, or end the run."""

    MAY_GROW: ClassVar[frozenset[str]] = frozenset({"num_train_epochs", "max_train_steps"})
    """Fields that a resumed run may raise, while the schedule is constant and its warm-up is no ratio. Any other
    schedule depends on the last step: after a change the steps already taken would belong to another run."""

    ALTERNATIVES: ClassVar[tuple[tuple[str, str], ...]] = (
        ("global_batch_size", "gradient_accumulation_steps"),
        ("warmup_steps", "warmup_ratio"),
    )
    """Pairs of fields that say the same in two ways: a flag (or line of the --config file) for one of them takes back
    the default (or the line) of the other."""

    NEEDS: ClassVar[tuple[tuple[str, str], ...]] = (
        ("dataset_config_name", "dataset_name"),
        ("train_split_name", "dataset_name"),
        ("validation_split_name", "dataset_name"),
        ("validation_file", "train_file"),
        ("csv_delimiter", "train_file"),
        ("gradient_accumulation_steps", "per_device_train_batch_size"),
        ("early_stopping_patience", "metric_for_best_model"),
        ("load_best_model_at_end", "metric_for_best_model"),
        ("greater_is_better", "metric_for_best_model"),
        ("positive_label", "metric_name"),
        ("hub_model_id", "push_to_hub"),
    )
    """Pairs of which the first has no effect without the second."""


AnyConfig = TypeVar("AnyConfig", bound=Options)


def parse(config_class: type[AnyConfig], argv: Sequence[str] | None = None) -> AnyConfig:
    """The Config that `argv` (None: the command line) describes, checked: defaults < --config FILE.yaml < flags.

    Raises UserError, in one line, for an unknown flag or YAML key, a bad or missing value, a file that cannot be read,
    and whatever `check` refuses. --help prints the help and exits with 0.
    """
    values: dict[str, Any] = {}
    for layer in command_line.layers(config_class, sys.argv[1:] if argv is None else argv):
        for one, other in (*config_class.ALTERNATIVES, *(pair[::-1] for pair in config_class.ALTERNATIVES)):
            if layer.get(one) is not None:
                layer.setdefault(other, None)
        values |= layer
    config = config_class(**values)
    check(config)
    return config


def check(config: Options) -> None:
    """Raise UserError for a value, or a combination of values, that is wrong on any data and any machine."""
    hints = command_line.field_types(type(config))
    config_class: type = type(config)
    limits = limits_of(config_class)
    given = {}
    for name, hint in hints.items():
        value, kind = getattr(config, name), command_line.kind(hint)
        if not command_line.fits(value, hint):
            raise UserError(f"--{name} {value!r}: expected {command_line.expected(hint)}")
        if value is None or (value is False and hint is bool):
            continue
        given[name] = shown(value) if isinstance(value, tuple) else value
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if problem := problem_with(float(number) if kind is float else number, limits.get(name)):
                raise UserError(f"--{name} {shown(value)}: {problem}")

    steps = config.checkpointing_steps
    if steps not in ("epoch", "no") and not (steps.isdecimal() and int(steps) > 0):
        raise UserError(f"--checkpointing_steps {steps!r}: expected epoch, no, or a number of steps")

    mark = "," if config.csv_delimiter is None else config.csv_delimiter
    if mark != r"\t" and not (len(mark) == 1 and mark.isascii() and mark not in '"\r\n'):
        raise UserError(f"--csv_delimiter {mark!r}: must be one character such as ';', or '\\t' for a tab")
    if len(set(config.report_to)) < len(config.report_to) or ("none" in config.report_to and len(config.report_to) > 1):
        raise UserError(f"--report_to {shown(config.report_to)}: give each tracker once, or none alone")
    if not config.report_to:
        raise UserError("--report_to is empty: give none, or trackers")
    if "decay_ratio" in given and config.lr_scheduler_type != "warmup_stable_decay":
        raise UserError(
            f"--decay_ratio {config.decay_ratio} has no effect without --lr_scheduler_type warmup_stable_decay: give "
            "both, or neither"
        )
    for name in ("adam_beta1", "adam_beta2", "adam_epsilon"):
        if name in given and config.optim not in ("adamw", "muon"):
            raise UserError(f"--{name} {given[name]} has no effect on --optim {config.optim}: leave it out")
    for name, other in config.NEEDS:
        if name in given and other not in given:
            raise UserError(f"--{name} {given[name]} has no effect without --{other}: give both, or neither")
    if "revision" in given and getattr(config, "model_name_or_path", None) is None:  # a field of the recipes
        raise UserError(
            f"--revision {config.revision} has no effect without --model_name_or_path: give both, or neither"
        )
    for name, other in (("dataset_name", "train_file"), ("warmup_steps", "warmup_ratio")):
        if name in given and other in given:
            raise UserError(f"--{name} {given[name]} and --{other} {given[other]} exclude each other: give one of them")
    batch, most, cut = config.global_batch_size, config.per_device_train_batch_size, config.micro_batches_per_step
    if batch is None and config.gradient_accumulation_steps is None:
        raise UserError("--global_batch_size None: give a number, or --gradient_accumulation_steps instead")
    if batch is not None and cut is not None:
        if cut > batch:
            raise UserError(f"--micro_batches_per_step {cut} is more than the samples of --global_batch_size {batch}")
        if most is not None and cut * most < batch:
            raise UserError(
                f"--global_batch_size {batch} is more than --micro_batches_per_step {cut} x "
                f"--per_device_train_batch_size {most} = {cut * most}: raise one of these"
            )


def shown(value: Any) -> str:
    """A value, or what config.yaml holds of it, as one writes it behind its flag."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def base_learning_rate(config: Options) -> float:
    """--learning_rate, before it is scaled to the batch; None is resolved: most weights are new, or all pretrained."""
    if config.learning_rate is not None:
        return config.learning_rate
    pretrained = getattr(config, "model_name_or_path", None) is not None
    new = getattr(config, "from_scratch", False) or getattr(config, "freeze_backbone", False)  # only a new head learns
    return config.LEARNING_RATES[pretrained and not new]


def differences(stored: Mapping[str, Any], config: Options) -> dict[str, tuple[Any, Any]]:
    """What keeps `config` from continuing the run with the settings `stored` (from `load`), as {field: (old, new)}.

    Empty when the run may go on. A field that `stored` lacks, because it is younger than the run, had its default. One
    value is a list of one: a field that takes several may have taken one only when the run began.
    """
    new = plain(config)
    old = plain(type(config)()) | dict(stored)
    old |= {name: [one] for name, one in old.items() if isinstance(one, str) and isinstance(new.get(name), list)}
    ignored = config.NEVER_MATTERS
    if not any(run["load_best_model_at_end"] or run["early_stopping_patience"] is not None for run in (old, new)):
        ignored |= config.CHOOSES_THE_MODEL
    if new["global_batch_size"] is None and new["gradient_accumulation_steps"] is not None:
        ignored |= {"global_batch_size"}  # derived once, at the first launch: a resumed run has the stored one
    can_grow = config.MAY_GROW if config.lr_scheduler_type == "constant" and config.warmup_ratio is None else ()

    result = {}
    for name, before in old.items():
        after = new.get(name)
        grown = name in can_grow and None not in (before, after) and before < after
        if before != after and not grown and name not in ignored:
            result[name] = (before, after)
    return result


def save(config: Options, path: str | Path) -> None:
    """Write every setting to `path` as YAML, in field order; `parse` with --config PATH gives `config` again, exactly.

    The file appears complete or not at all. No setting is a secret: keys and tokens come from the environment.
    """
    command_line.write_yaml(plain(config), path)


def load(path: str | Path) -> dict[str, Any]:
    """The settings that `save` wrote to `path`, by field name, tuples as lists; UserError when it cannot be read."""
    return command_line.read_yaml(path)


def plain(config: Options) -> dict[str, Any]:
    """The settings in field order, tuples as lists: as YAML and JSON hold them."""
    settings = dataclasses.asdict(config)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
