"""The metrics of a run, checked before it trains: shipped ones, and those of `evaluate` that --metric_name names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.errors import UserError, about, listed
from shared.metrics.functions import DEFAULTS, OF_CLASS, RANKED, SCORED, SHIPPED
from shared.monitoring.evaluation import gather_into
from shared.options.data_options import MetricOptions
from shared.plan.batches import MicroBatch
from shared.processes.collectives import on_main_process

ForeignFunction = Callable[[NDArray[Any], NDArray[Any]], dict[str, float]]  # of predictions and references


@dataclass
class TaskMetrics:
    """The metrics of a run of classification or regression."""

    names: tuple[str, ...] = ()  # of their values, the main one first
    undefined: dict[str, str] = field(default_factory=dict)  # those that cannot compare models on this data, and why
    kind: str = "classification"  # or "image_classification", "multi_label", "regression"
    num_labels: int = 1
    asked: tuple[str, ...] = ()  # names of shipped metrics, and keys of `foreign`
    foreign: dict[str, ForeignFunction] = field(default_factory=dict)
    positive: int | None = None  # the number of the class that metrics in `OF_CLASS` are about
    notes: dict[str, str] = field(default_factory=dict)  # rows for the launch card

    @property
    def take_scores(self) -> bool:
        """Whether one of the metrics takes probabilities."""
        return not set(SCORED).isdisjoint(self.asked)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The probability of each class or label, from logits [rows, labels]."""
        return logits.sigmoid() if self.kind == "multi_label" else logits.softmax(1)

    def compute(
        self, predictions: np.ndarray, references: np.ndarray, scores: np.ndarray | None = None
    ) -> dict[str, float]:
        """The values by name, without the prefix "eval_"; no collective call.

        Args:
            predictions: [n] class ids or numbers, [n, labels] of 0 and 1, or [n, k] class ids, the likeliest first.
            references: the same shape; [n] class ids where predictions are [n, k].
            scores: [n, labels] probabilities in float32, where `take_scores`.
        """
        assert len(predictions) == len(references), f"predictions {predictions.shape}, references {references.shape}"
        exact = np.float64 if self.kind == "regression" else np.int64
        ranked, true = predictions.astype(exact), references.astype(exact)
        first = ranked if ranked.shape == true.shape else ranked[:, 0]
        values: dict[str, float] = {}
        for name in self.asked:
            if name in self.foreign:
                values |= self.foreign[name](first, true)
            elif name in OF_CLASS:
                values[name] = SHIPPED[name](self.of_class(first), self.of_class(true))
            else:
                given: Any = scores if name in SCORED else ranked if name in RANKED else first
                values[name] = SHIPPED[name](given, true)
        return values

    def of_class(self, values: np.ndarray) -> np.ndarray:
        """[n] whether each sample is of the class `positive`, or has that label."""
        return values == self.positive if values.ndim == 1 else values[:, self.positive] == 1


@dataclass
class Scorer:
    """Predicts the batches of an evaluation, and computes its metrics; keeps probabilities if a metric takes them."""

    metrics: TaskMetrics
    predict: Callable[..., Sequence[torch.Tensor]]  # as for `evaluation.collect`; it also gives logits [rows, labels]
    numbers: list[np.ndarray] = field(default_factory=list)  # of the samples of each batch
    rows: list[torch.Tensor] = field(default_factory=list)  # their probabilities

    def __call__(self, model: Any, micro_batch: MicroBatch, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Predictions and losses of a batch."""
        predictions, losses, logits = self.predict(model, micro_batch, batch)
        if self.metrics.take_scores and micro_batch.counted:
            self.numbers.append(micro_batch.samples)
            self.rows.append(self.metrics.probabilities(logits.float()))
        return predictions, losses

    def compute(self, accelerator: Any, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        """The values of `TaskMetrics.compute`, once the batches of all processes are predicted; call it on each."""
        scores = self.probabilities(accelerator, len(references)) if self.metrics.take_scores else None
        return on_main_process(accelerator, lambda: self.metrics.compute(predictions, references, scores))

    def probabilities(self, accelerator: Any, total: int) -> np.ndarray:
        """Those of the whole data set in its order, float32 [total, labels], on the main process; [0, labels] else."""
        table = np.empty((total if accelerator.is_main_process else 0, self.metrics.num_labels), np.float32)
        gather_into(table, total, accelerator, self.numbers, self.rows)
        return table


def resolve_metrics(config: MetricOptions, kind: str, names: Sequence[str], targets: np.ndarray) -> TaskMetrics:
    """The metrics of a run, checked before it trains. Every process calls this.

    Args:
        config: --metric_name and --positive_label. Each metric is the name of a shipped one, or what `load_foreign`
            takes. None means the defaults of this kind.
        kind: "classification", "image_classification", "multi_label" or "regression".
        names: of the classes or labels, in the order of the model's outputs; empty for regression.
        targets: [n] or [n, labels], of the validation data; `notes` say which metrics they make undefined or 0.

    Raises:
        UserError: a metric does not exist, does not fit this kind, or cannot be loaded; its code needs
            --trust_remote_code; or --positive_label is unknown, missing, or without effect.
    """
    # The true class is always among the five likeliest of at most five.
    defaults = tuple(name for name in DEFAULTS[kind] if len(names) > 5 or name not in RANKED)
    fitting = defaults if kind == "regression" else (*defaults, *OF_CLASS, *SCORED)
    one_of = ", ".join(fitting)
    task = kind if kind == "regression" else f"{kind} with {len(names)} labels"
    metrics = TaskMetrics(kind=kind, num_labels=len(names) or 1, asked=config.metric_name or defaults)
    for name in metrics.asked:
        computed: tuple[str, ...] = (name,)
        if name not in fitting:
            if name in SHIPPED:
                raise UserError(f"--metric_name {name} does not fit {task}: use one of {one_of}")
            metrics.foreign[name], computed = load_foreign(name, metrics, task, one_of, config.trust_remote_code)
        if both := set(computed) & {"loss", *metrics.names}:
            raise UserError(
                f"--metric_name {' '.join(metrics.asked)}: eval_{min(both)} would be computed twice: leave one out"
            )
        metrics.names += computed
    metrics.positive = positive_class(config, kind, names)
    describe(metrics, names, targets)
    return metrics


def positive_class(config: MetricOptions, kind: str, names: Sequence[str]) -> int | None:
    """The index of --positive_label in `names`; None where no metric is about one class.

    Raises:
        UserError: --positive_label is unknown, missing, or without effect.
    """
    asked, label = config.metric_name or (), config.positive_label
    of_class = [name for name in asked if name in OF_CLASS]
    if label is None and (not of_class or (len(names) == 2 and kind != "multi_label")):
        return 1 if of_class else None
    if not of_class:
        raise UserError(
            f"--positive_label {label} has no effect: no metric of --metric_name {' '.join(asked)} needs it"
        )
    if label not in names:
        raise UserError(
            f"--positive_label {label}: --metric_name {of_class[0]} is about one class of the data: use one of "
            f"{listed(names, 10)}"
        )
    return names.index(label)


def describe(metrics: TaskMetrics, names: Sequence[str], targets: np.ndarray) -> None:
    """Note which class the metrics are about, and which the validation data `targets` makes undefined or 0."""
    if metrics.positive is None and not metrics.take_scores:
        return
    rows = targets.sum(0) if metrics.kind == "multi_label" else np.bincount(targets, minlength=len(names))
    if metrics.positive is not None:
        label = names[metrics.positive]
        metrics.notes["positive label"] = label
        if not rows[metrics.positive]:
            why = f"no row of the validation data is of class {label}"
            metrics.notes["note on --positive_label"] = f"{why}: its metrics stay 0"
            metrics.undefined |= {name: why for name in metrics.names if name in OF_CLASS}
    without = [name for name, count in zip(names, rows, strict=True) if count in (0, len(targets))]
    if metrics.take_scores and len(without) == len(names):
        why = f"each row of the validation data has the same {'labels' if metrics.kind == 'multi_label' else 'class'}"
        metrics.notes["note on --metric_name"] = f"{', '.join(SCORED)} cannot be computed (NaN): {why}"
        metrics.undefined |= dict.fromkeys(SCORED, why)
    elif metrics.take_scores and without:
        metrics.notes["note on --metric_name"] = (
            f"{', '.join(SCORED)} is the mean over {len(names) - len(without)} of {len(names)} classes: the others are "
            f"in none or all rows of the validation data ({listed(without)})"
        )


def load_foreign(
    metric_name: str, metrics: TaskMetrics, task: str, shipped: str, trust_remote_code: bool
) -> tuple[ForeignFunction, tuple[str, ...]]:
    """A metric that is not shipped: a function of `predictions` and `references`, and the names of its values.

    It is tried on perfect predictions: one that would fail after the first epoch (F1 without an average) fails here.
    Its rows stay in memory, so it shares no file with another run.

    Args:
        metric_name: a .py file, a folder NAME with NAME.py in it, or a name on the Hub.
        metrics: of the run.
        task, shipped: the task, and the shipped metrics that fit it, for the errors.
        trust_remote_code: whether code from the Hub may run.

    Raises:
        UserError: there is no such metric, it cannot be computed, or its code needs --trust_remote_code.
    """
    given = Path(metric_name).expanduser()
    script = given if given.suffix == ".py" else given / f"{given.resolve().name}.py"
    here = script.is_file()
    if not here and not trust_remote_code:
        raise UserError(
            f"--metric_name {metric_name} is not one of {shipped}, nor a .py file or a folder NAME with NAME.py here; "
            "a metric from the Hub is code that will run on this machine: add --trust_remote_code to allow it"
        )
    several = metrics.kind == "multi_label"
    sample = np.eye(metrics.num_labels, dtype=np.int64) if several else np.arange(metrics.num_labels)
    if metrics.kind == "regression":
        sample = np.array([0.0, 1.0, 2.0])
    problem = f"--metric_name {metric_name} cannot be computed for {task}"
    with about(problem):
        import evaluate

        # Rows of 0 and 1 have the name that evaluate's own accuracy and f1 have for them.
        metric = evaluate.load(
            str(script.resolve()) if here else metric_name,
            config_name="multilabel" if several else None,
            module_type="metric",
            keep_in_memory=True,
        )

        def compute(predictions: NDArray[Any], references: NDArray[Any]) -> dict[str, float]:
            with about(problem):
                values = metric.compute(predictions=predictions, references=references)
                return {name: float(value) for name, value in values.items()}

        return compute, tuple(compute(sample, sample))
