"""The settings that all recipes share, their parser and checks, and what a resumed run may change."""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from shared.config import command_line
from shared.config.fields import CanBeZero, Limits, Meaning, Share, fields_with, limits_of, violation
from shared.disk import is_url
from shared.errors import UserError

NOT_IN_RESULT = "# do not affect the result: "
RECIPE = "# recipe: "
PROJECT = Path(__file__).resolve().parents[2]  # the folder that holds shared/
ScheduleType = Literal["linear", "cosine", "constant", "polynomial", "warmup_stable_decay"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """A launch is refused if `when` finds something; `message` may name it as {found}, and parts of the launch as {it}.

    `when` gets a `Launch` of shared/processes/rules.py.
    """

    when: Callable[[Any], Any]
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings that all recipes share. A recipe subclasses this, adds fields and changes defaults.

    Every field has a default and a docstring, which is its --help. The type of a number contains its limits; without
    limits, an integer is at least 1 and a float at least 0. A resumed run must have the same value of every field,
    unless the type says otherwise: see shared/config/fields.py.
    """

    dataloader_num_workers: Annotated[CanBeZero | None, Meaning.NOT_IN_RESULT, Meaning.MAY_DIFFER] = None
    """Data loader workers per training process. None: 2 with an accelerator, 0 on a CPU."""

    # Batches
    global_batch_size: int = 32
    """Samples per optimizer step, over all processes and micro-batches; does not depend on the number of processes."""
    per_device_train_batch_size: int | None = None
    """Maximum number of samples in a micro-batch. None: no limit."""
    micro_batches_per_step: int | None = None
    """Micro-batches per global batch. None: the smallest of 1, 2, 4, 8, 16, 24, ... within both micro-batch limits."""

    # Optimization
    optim: Literal["adamw", "sgd"] = "adamw"
    """Optimizer."""
    learning_rate: Annotated[float, Limits(above=0)] | None = 5e-5
    """Peak learning rate, reached after the warm-up. None: see the recipe."""
    adam_beta1: Annotated[float, Limits(least=0, below=1)] | None = None
    """Decay per step of AdamW's moving average of gradients. None: 0.9."""
    adam_beta2: Annotated[float, Limits(least=0, below=1)] | None = None
    """Decay per step of AdamW's moving average of squared gradients. None: 0.999, with muon 0.95."""
    adam_epsilon: Annotated[float, Limits(above=0)] | None = None
    """Added to the denominator of AdamW's update. None: 1e-8, with muon 1e-10."""
    weight_decay: float = 0.01
    """Weight decay, decoupled with adamw; not applied to biases and norms."""
    num_train_epochs: Annotated[int, Meaning.MAY_GROW] = 3
    """Passes over the training data."""
    max_train_steps: Annotated[int | None, Meaning.MAY_GROW] = None
    """Number of optimizer steps, instead of --num_train_epochs. None: determined by the epochs."""
    lr_scheduler_type: ScheduleType = "linear"
    """Learning rate schedule after the warm-up. A finished run can be made longer with constant and --warmup_steps."""
    decay_ratio: Share | None = None
    """Fraction of all optimizer steps over which warmup_stable_decay decays to 0 at the end. None: 0.2."""
    warmup_steps: CanBeZero | None = None
    """Optimizer steps over which the learning rate rises from 0 to its peak. None: given by --warmup_ratio, or 0."""
    warmup_ratio: Share | None = None
    """Warm-up as a fraction of all optimizer steps, from 0 to 1, instead of --warmup_steps."""
    max_grad_norm: float = 1.0
    """Gradients are clipped to this norm (L2, over all parameters). 0: no clipping."""

    # Precision
    mixed_precision: Literal["launcher", "no", "fp16", "bf16"] = "launcher"
    """Precision of the forward and backward passes. launcher: that of accelerate launch. Weights stay float32."""
    deterministic: bool = False
    """Use only deterministic kernels: runs are bit-identical on a GPU, too, but slower."""
    seed: CanBeZero = 0
    """Random seed of initial weights, sample order, dropout, masking and augmentation."""

    # The run
    output_dir: Annotated[str, Meaning.NOT_IN_RESULT] = "out"
    """Folder of the run: config.yaml, metrics.jsonl, checkpoints/, model/."""
    resume_from_checkpoint: Annotated[str, Meaning.NOT_IN_RESULT] = "auto"
    """auto: the newest intact checkpoint in --output_dir, if there is one. never: start anew. Or a PATH."""
    checkpointing_steps: Annotated[str, Meaning.NOT_IN_RESULT] = "epoch"
    """Steps between checkpoints. epoch: save at the end of each epoch. no: save only when interrupted or stopped."""
    save_total_limit: Annotated[int | None, Meaning.NOT_IN_RESULT] = 3
    """Number of checkpoints to keep, besides the best one. None: all."""
    failed_saves: Annotated[Literal["wait", "end"], Meaning.NOT_IN_RESULT] = "wait"
    """What to do if two saves in a row fail. wait: wait, and try again each minute. end: end the run with an error."""
    save_on_each_node: Annotated[bool, Meaning.NOT_IN_RESULT] = False
    """Each machine writes its own checkpoints, because the machines do not share --output_dir."""
    eval_steps: Annotated[int | None, Meaning.CHOOSES_MODEL] = None
    """Optimizer steps between evaluations. None: evaluate at the end of each epoch."""
    logging_steps: Annotated[int, Meaning.NOT_IN_RESULT] = 10
    """Optimizer steps between log entries."""
    load_best_model_at_end: Annotated[bool, Meaning.CHOOSES_MODEL] = False
    """Write the best evaluated model to model/ instead of the last one. Needs --metric_for_best_model."""
    metric_for_best_model: Annotated[str | None, Meaning.CHOOSES_MODEL] = None
    """Evaluation metric that selects the best model, such as accuracy or loss."""
    greater_is_better: Annotated[bool | None, Meaning.CHOOSES_MODEL] = None
    """Whether a larger --metric_for_best_model is better. None: yes, except for names such as loss and error."""
    early_stopping_patience: Annotated[int | None, Meaning.CHOOSES_MODEL] = None
    """End the run after this many evaluations in a row without improvement. None: never."""
    run_name: Annotated[str | None, Meaning.NOT_IN_RESULT] = None
    """Name of the run in the model card and in a tracker. None: the name of --output_dir."""
    expect_processes: Annotated[int | None, Meaning.NOT_IN_RESULT, Meaning.MAY_DIFFER] = None
    """Refuse to start with another number of processes: some launchers silently start only one. None: any number."""
    dry_run: Annotated[bool, Meaning.NOT_IN_RESULT] = False
    """Prepare everything, print the launch card, and end before the first step."""

    def __post_init__(self) -> None:
        """Convert lists and single values of tuple fields to tuples, as for flags and YAML files."""
        config_class: type = type(self)
        for name, kind in command_line.kinds_of(config_class).items():
            if kind.many and (value := getattr(self, name)) is not None and not isinstance(value, tuple):
                object.__setattr__(self, name, tuple(value) if isinstance(value, list) else (value,))

    # How the fields are treated. A subclass that adds fields may extend these.
    ALTERNATIVES: ClassVar[tuple[tuple[str, str], ...]] = (("warmup_steps", "warmup_ratio"),)
    """Pairs of alternative fields: a flag (or line of the --config file) for one of them resets the default (or the
    line) of the other to None."""

    NEEDS: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("decay_ratio", "lr_scheduler_type", "warmup_stable_decay"),
        *((name, "optim", "adamw", "muon") for name in ("adam_beta1", "adam_beta2", "adam_epsilon")),
        ("early_stopping_patience", "metric_for_best_model"),
        ("load_best_model_at_end", "metric_for_best_model"),
        ("greater_is_better", "metric_for_best_model"),
    )
    """Pairs of fields in which the first has no effect without the second, or without the values of it that follow.
    Values that the second field cannot have are ignored."""

    SAVES_MEMORY: ClassVar[str | None] = None
    """A flag of these settings that lowers memory and does not affect the result."""

    EXCLUDES: ClassVar[tuple[tuple[str, str], ...]] = (("warmup_steps", "warmup_ratio"),)
    """Pairs of fields of which at most one may be given."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda it: it.sharded,
            "distributed_type FSDP needs settings that allow it, and this recipe has none: use "
            "accelerate_configs/multi_gpu.yaml, or let its Config inherit ExtraOptions",
        ),
    )
    """What a launch must not combine with these settings, in addition to the rules of shared/processes/rules.py."""

    def model_digest(self) -> str | None:
        """A digest of the settings that a local pretrained model has in its folder; None: there is none."""
        return None

    def moved(self, state: Mapping[str, Any], model: str | None) -> dict[str, tuple[str, str]]:
        """The settings whose data or model may be at another path than in a checkpoint, as {field: (old, new)}.

        `state` is its state.json; `model` is the `model_digest` of now.
        """
        return {}

    @property
    def max_tokens(self) -> int | None:
        """--max_tokens_per_micro_batch, the budget of a micro-batch, of settings that have it; None: no limit."""
        return None

    @property
    def decay_start(self) -> int | None:
        """The step at which the run begins to decay, and begins at all; None: --decay_ratio says where the decay is."""
        return None

    def default_learning_rate(self) -> float:
        """The learning rate for --learning_rate None."""
        return 5e-5

    def base_learning_rate(self) -> float:
        """--learning_rate before scaling to the batch; for None, the default."""
        return self.default_learning_rate() if self.learning_rate is None else self.learning_rate

    def peak_learning_rate(self) -> float:
        """--learning_rate, as the settings scale it to the global batch of the run."""
        return self.base_learning_rate()

    def settled(self, accelerator: Any, stored: Mapping[str, Any] | None) -> Self:
        """These settings, with those that depend on the launch filled in. A subclass may extend it.

        Args:
            accelerator: of the launch.
            stored: the settings of the run that the launch resumes; None: a new run.
        """
        rate = self.base_learning_rate()
        return dataclasses.replace(self, mixed_precision=accelerator.mixed_precision, learning_rate=rate)

    def hooks(self) -> list[Any]:
        """What these settings add to a run: new objects of `Hook` (shared/monitoring/hooks.py)."""
        return []

    def check_values(self) -> None:
        """Raise UserError for values that no type excludes. A subclass may extend it."""
        steps = self.checkpointing_steps
        if steps not in ("epoch", "no") and not (steps.isdecimal() and int(steps) > 0):
            raise UserError(f"--checkpointing_steps {steps!r}: expected epoch, no, or a number of steps")
        if is_url(self.output_dir):  # the system would make a folder "s3:" here
            raise UserError(f"--output_dir {self.output_dir} is a URL: give a folder (mirrors: docs/checkpoints.md)")


AnyConfig = TypeVar("AnyConfig", bound=Options)


def parse(config_class: type[AnyConfig], argv: Sequence[str] | None = None) -> AnyConfig:
    """Return the checked Config of `argv` (None: the command line). Flags override --config FILE.yaml and defaults.

    --help prints the help and exits with 0.

    Raises:
        UserError: an unknown flag or YAML key, a wrong or missing value, a file that cannot be read, or an error of
            `check`.
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
    """Raise UserError for values, or combinations of values, that are wrong for any data and on any machine."""
    config_class: type = type(config)
    kinds, limits, given = command_line.kinds_of(config_class), limits_of(config_class), {}
    for name, kind in kinds.items():
        value = getattr(config, name)
        if not kind.accepts(value):
            raise UserError(f"--{name} {value!r}: expected {kind}")
        if value is None or (value is False and not kind.optional):
            continue
        given[name] = shown(value) if isinstance(value, tuple) else value
        for number in value if isinstance(value, tuple) else (value,):
            if kind.one in (int, float) and (problem := violation(kind.one(number), limits.get(name))):
                raise UserError(f"--{name} {shown(value)}: {problem}")

    config.check_values()
    for name, other, *known in config.NEEDS:
        values = [value for value in known if kinds[other].accepts(value)]  # a subclass may have more of them
        if name in given and (given.get(other) not in values if values else other not in given):
            needed = " ".join([f"--{other}", " or ".join(values)]).strip()
            raise UserError(f"--{name} {given[name]} has no effect without {needed}: give both, or neither")
    for name, other in config.EXCLUDES:
        if name in given and other in given:
            raise UserError(f"--{name} {given[name]} and --{other} {given[other]} exclude each other: give one of them")
    batch, most, cut = config.global_batch_size, config.per_device_train_batch_size, config.micro_batches_per_step
    if batch is not None and cut is not None:  # a subclass may allow None
        if cut > batch:
            raise UserError(f"--micro_batches_per_step {cut} is more than the samples of --global_batch_size {batch}")
        if most is not None and cut * most < batch:
            raise UserError(
                f"--global_batch_size {batch} is more than --micro_batches_per_step {cut} x "
                f"--per_device_train_batch_size {most} = {cut * most}: raise one of these"
            )


def shown(value: Any) -> str:
    """A value, also one loaded from config.yaml, as it is written after its flag."""
    return " ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def differences(stored: Mapping[str, Any], config: Options) -> dict[str, tuple[Any, Any]]:
    """The changes that prevent `config` from resuming a run with settings `stored` (from `load`): {field: (old, new)}.

    Empty if it can resume. A field missing in `stored`, because it was added to the code later, had its default. A
    switch that the code no longer has changes nothing if it was off.
    """
    new = plain(config)
    kept = {name: value for name, value in stored.items() if name in new or value is not False}
    old = kept | plain(type(config)(**{name: stored[name] for name in stored if name in new}))
    ignored = fields_with(type(config), Meaning.NOT_IN_RESULT)
    if not any(run["load_best_model_at_end"] or run["early_stopping_patience"] is not None for run in (old, new)):
        ignored |= fields_with(type(config), Meaning.CHOOSES_MODEL)
    constant = config.lr_scheduler_type == "constant" and config.warmup_ratio is None
    can_grow = fields_with(type(config), Meaning.MAY_GROW) if constant else ()

    result = {}
    for name, before in old.items():
        after = new.get(name)
        grown = name in can_grow and None not in (before, after) and before < after
        if before != after and not grown and name not in ignored:
            result[name] = (before, after)
    return result


def save(config: Options, path: str | Path) -> None:
    """Write all settings to `path` as YAML, in field order; `parse` with --config PATH returns an equal Config.

    The first lines are comments: the names of the settings without an effect on the result, for `shared.compare`, and
    the recipe, for `recipe_of` of shared/run/recipes.py.

    The file is complete or does not exist. Settings contain no secrets: keys and tokens come from the environment.
    """
    names = sorted(fields_with(type(config), Meaning.NOT_IN_RESULT))
    comment = NOT_IN_RESULT + " ".join(names)
    if file := getattr(sys.modules.get(type(config).__module__), "__file__", None):  # a notebook has none
        recipe = Path(file).resolve()
        comment += f"\n{RECIPE}{recipe.relative_to(PROJECT) if recipe.is_relative_to(PROJECT) else recipe}"
    command_line.write_yaml(plain(config), path, comment)


def load(path: str | Path) -> dict[str, Any]:
    """Read the settings that `save` wrote to `path`: {field: value}, tuples as lists; UserError if that fails."""
    return command_line.read_yaml(path)


def plain(config: Options) -> dict[str, Any]:
    """The settings as {field: value} in field order, tuples as lists, for YAML and JSON."""
    return {name: list(it) if isinstance(it, tuple) else it for name, it in dataclasses.asdict(config).items()}
