"""Evaluation over any number of processes, which counts each sample once, in dataset order; and its metrics."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from shared.checkpoints.progress import BestBy
from shared.config.options import Options
from shared.errors import UserError
from shared.monitoring.metric_sources import (
    DEFAULT_METRICS,
    OF_CLASS,
    RANKED,
    SCORED,
    compute_function,
    find_source,
    has_evaluate,
    shipped_name,
)
from shared.plan.batches import MicroBatch
from shared.processes import preemption
from shared.processes.collectives import on_main_process

NUMBERS_AT_ONCE = 2**24  # that travel in one collective call: 64 or 128 MiB
LOWER_IS_BETTER = {"loss", "error", "mse", "rmse", "mae", "mape", "perplexity", "wer", "cer"}


def gather_rows(accelerator: Any, indices: np.ndarray | torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
    """The rows of all processes in dataset order, on every process, each sample counted exactly once.

    Every process calls this once, with the rows it computed. A process that computed none passes an empty tensor of the
    same trailing shape and dtype. The caller leaves out batches that are repeated only to keep processes in step
    (FSDP). Accelerate's `gather_for_metrics` loses or repeats samples when batches vary in size.

    Args:
        accelerator: has the device and sums over processes.
        indices: [n] the dataset's sample number of each row.
        rows: [n, ...] float32, float64 or int64; predictions rather than logits, as every process holds the result.
        total: number of samples in the dataset.

    Returns:
        [total, ...] on the accelerator's device; row i belongs to sample i.

    Raises:
        AssertionError: on every process, when a sample is missing or came more than once; names the first such sample.
    """
    assert rows.dtype in (torch.float32, torch.float64, torch.int64), f"rows are {rows.dtype}: a sum would be inexact"
    assert len(indices) == len(rows), f"{len(indices)} indices for {len(rows)} rows"
    flat = rows.detach().reshape(len(rows), rows.shape[1:].numel())
    # One collective: each row goes into a table of zeros, and x + 0 is exact. A last column of ones counts the rows.
    counted = torch.cat([flat, flat.new_ones(len(flat), 1)], dim=1).to(accelerator.device)
    table = counted.new_zeros(total, counted.shape[1])
    table.index_add_(0, torch.as_tensor(indices, dtype=torch.int64, device=accelerator.device), counted)
    table = accelerator.reduce(table, reduction="sum")
    times = table[:, -1]
    wrong = (times != 1).nonzero().flatten().tolist()
    assert not wrong, f"sample {wrong[0]} of {total} was evaluated {int(times[wrong[0]])} times, not once"
    return table[:, :-1].reshape(total, *rows.shape[1:])


class Rows:
    """Collects the predictions of one process on its share of a dataset, and gathers the shares.

    Args:
        shape: of the predictions for the whole dataset: (samples,) or (samples, labels).
        metrics: computed from the predictions; where one of them takes probabilities, these are collected as well.
    """

    def __init__(self, shape: tuple[int, ...], metrics: "Metrics | None" = None) -> None:
        self.shape, self.metrics = shape, metrics
        self.samples = [np.empty(0, np.int64)]
        self.rows: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []

    def add(
        self,
        micro_batch: MicroBatch,
        predictions: torch.Tensor,
        losses: torch.Tensor,
        logits: torch.Tensor | None = None,
    ) -> None:
        """Add a micro-batch's predictions [rows] or [rows, labels] and losses [rows]; a repeated batch is ignored.

        Where a metric takes probabilities, they are computed from `logits` [rows, labels].
        """
        if micro_batch.counted:
            self.samples.append(micro_batch.samples)
            self.rows.append(torch.cat([losses[:, None], predictions.reshape(len(losses), -1)], dim=1).double())
            if self.metrics and self.metrics.take_scores:
                assert logits is not None, "a metric takes probabilities, and the recipe gave no logits"
                self.scores.append(self.metrics.probabilities(logits.float()))

    def gather(self, accelerator: Any) -> tuple[np.ndarray, np.ndarray]:
        """Predictions and losses of the whole dataset in its order, on every process; call this on all processes."""
        table = np.empty((self.shape[0], 1 + math.prod(self.shape[1:])))
        self._gather_into(table, accelerator, self.rows)
        return table[:, 1:].reshape(self.shape), table[:, 0]

    def gather_scores(self, accelerator: Any) -> np.ndarray | None:
        """Probabilities [samples, labels] of the whole dataset in its order, float32, on the main process.

        None on the other processes, and where no metric takes probabilities. Call this on all processes.
        """
        if not (self.metrics and self.metrics.take_scores):
            return None
        rows = self.shape[0] if accelerator.is_main_process else 0
        table = np.empty((rows, self.metrics.num_labels), np.float32)
        self._gather_into(table, accelerator, self.scores)
        return table if accelerator.is_main_process else None

    def _gather_into(self, table: np.ndarray, accelerator: Any, rows: list[torch.Tensor]) -> None:
        """Fill `table` with the rows of all processes in the order of the dataset; an empty table stays empty.

        A thousand classes take 4 kB per sample, so the rows are gathered and copied from the device in pieces.
        """
        samples, (_, width) = np.concatenate(self.samples), table.shape
        mine = torch.cat(rows) if rows else torch.from_numpy(np.empty((0, width), table.dtype))
        at_once = max(1, NUMBERS_AT_ONCE // width)
        for start in range(0, self.shape[0], at_once):
            inside = np.flatnonzero((start <= samples) & (samples < start + at_once))
            count = min(at_once, self.shape[0] - start)
            part = gather_rows(accelerator, samples[inside] - start, mine[torch.from_numpy(inside)], count)
            if len(table):
                table[start : start + count] = part.cpu().numpy()


@torch.inference_mode()
def collect(
    accelerator: Any,
    model: Any,
    batches: Iterable[tuple[MicroBatch, Any]],
    predict: Callable[[Any, MicroBatch, Any], Sequence[torch.Tensor]],
    shape: tuple[int, ...],
    metrics: "Metrics | None" = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None] | None:
    """Predict a whole data set, each process its share. Every process calls this.

    Args:
        model: as the loop calls it; it is in evaluation mode during the pass.
        batches: of this process: `feed` of `Plan.evaluation`.
        predict: called with the unwrapped model, the micro-batch and its batch; gives what `Rows.add` takes.
        shape: of the predictions: (samples,) or (samples, labels).
        metrics: where one of these takes probabilities, they are collected as well.

    Returns:
        Predictions of `shape` and losses [samples] in the order of the data, and what `Rows.gather_scores` gives. None
        if a signal cut the pass short.
    """
    model = accelerator.unwrap_model(model).eval()  # DDP's wrapper would wait for processes that have no batch
    rows = Rows(shape, metrics)
    for micro_batch, batch in preemption.watch(accelerator, batches):
        rows.add(micro_batch, *predict(model, micro_batch, batch))
    model.train()
    return None if preemption.cut_short(accelerator) else (*rows.gather(accelerator), rows.gather_scores(accelerator))


def best_by(config: Options, metrics: "Metrics") -> BestBy:
    """Which evaluation number decides the best model: --metric_for_best_model, or the main metric of the task.

    Raises:
        UserError: evaluation computes no number of that name, or the number cannot compare models on this data.
    """
    names = ("loss", *metrics.names)
    name = (config.metric_for_best_model or metrics.main_name).removeprefix("eval_")
    if name not in names:
        raise UserError(f"--metric_for_best_model {name} is not computed: use one of {', '.join(names)}")
    if config.metric_for_best_model and name in metrics.empty:
        raise UserError(f"--metric_for_best_model {name} cannot tell which model is best: {metrics.empty[name]}")
    greater = greater_is_better(name) if config.greater_is_better is None else config.greater_is_better
    return BestBy(f"eval_{name}", greater, tuple(f"eval_{each}" for each in metrics.names))


@dataclass
class Metrics:
    """The metrics of a run. They are loaded when the first value is computed: `evaluate` takes seconds to import."""

    sources: tuple[str, ...] = ()  # for evaluate.load: files, or names on the Hub
    names: tuple[str, ...] = ()  # of the values
    multi_label: bool = False
    num_labels: int = 1
    positive: int | None = None  # the number of the class that metrics in `OF_CLASS` are about
    notes: dict[str, str] = field(default_factory=dict)  # rows for the launch card
    empty: dict[str, str] = field(default_factory=dict)  # metrics that cannot compare models on this data, and why
    _functions: dict[str, Callable[..., dict[str, float]]] = field(default_factory=dict, init=False, repr=False)

    @property
    def main_name(self) -> str:
        """The default of --metric_for_best_model."""
        return self.names[0]

    @property
    def take_scores(self) -> bool:
        """Whether one of the metrics takes probabilities."""
        return any(shipped_name(source) in SCORED for source in self.sources)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """The probability of each class or label, from logits [rows, labels]."""
        return logits.sigmoid() if self.multi_label else logits.softmax(1)

    def compute(
        self, predictions: np.ndarray, references: np.ndarray, scores: np.ndarray | None = None
    ) -> dict[str, float]:
        """The values by name, without the prefix "eval_"; no collective call.

        Args:
            predictions: [n] class ids or numbers, [n, labels] of 0 and 1, or [n, k] class ids, the likeliest first.
            references: the same shape; [n] class ids where predictions are [n, k].
            scores: [n, labels] probabilities, where `take_scores`.
        """
        assert len(predictions) == len(references), f"predictions {predictions.shape}, references {references.shape}"
        values: dict[str, float] = {}
        first = predictions if predictions.shape == references.shape else predictions[:, 0]
        for source in self.sources:
            name = shipped_name(source)
            given = scores if name in SCORED else predictions if name in RANKED else first
            of_class = {"pos_label": self.positive} if name in OF_CLASS else {}
            values |= self.compute_one(source, predictions=given, references=references, **of_class)
        return values

    def compute_one(self, source: str, **given: Any) -> dict[str, float]:
        """The values of the metric at `source`, which is loaded at the first call."""
        if source not in self._functions:
            self._functions[source] = compute_function(source, self.multi_label)
        return {name: float(value) for name, value in self._functions[source](**given).items()}


def computed_by_recipe(config: Options, names: tuple[str, ...]) -> Metrics:
    """The metrics of a recipe that computes them itself, the main one first.

    Raises:
        UserError: --metric_name is given.
    """
    if config.metric_name:
        raise UserError(
            f"--metric_name {' '.join(config.metric_name)}: this recipe always computes {', '.join(names)}; leave the "
            "flag out"
        )
    return Metrics(names=names)


def compute_on_main(
    accelerator: Any,
    metrics: Metrics,
    predictions: np.ndarray,
    references: np.ndarray,
    scores: np.ndarray | None = None,
) -> dict[str, float]:
    """`metrics.compute` on the main process; all processes get its result, so all decide alike (stop, best).

    `scores`, from `Rows.gather_scores`, are on the main process only.
    """
    return on_main_process(accelerator, lambda: metrics.compute(predictions, references, scores))


def greater_is_better(name: str) -> bool:
    """Whether a larger value of this metric is better: True unless a word of its name means a loss or an error."""
    return LOWER_IS_BETTER.isdisjoint(name.lower().split("_"))


def resolve(config: Options, kind: str, names: Sequence[str], targets: np.ndarray) -> Metrics:
    """The metrics of a run, checked before it trains. Every process calls this.

    A shipped metric is only looked up. A metric of the user or from the Hub is loaded and tried on perfect predictions:
    one that would fail after the first epoch (F1 without an average) fails here.

    Args:
        config: --metric_name and --positive_label. Each metric is the name of a folder under shared/monitoring/metrics,
            a file, a folder NAME with NAME.py in it, or a name on the Hub, which needs --trust_remote_code. None means
            the defaults of this kind.
        kind: "classification", "image_classification", "multi_label" or "regression".
        names: of the classes or labels, in the order of the model's outputs; empty for regression.
        targets: [n] or [n, labels], of the validation data; `notes` say which metrics they make undefined or 0.

    Raises:
        UserError: a metric does not exist, does not fit this kind, or cannot be loaded; its code needs
            --trust_remote_code; or --positive_label is unknown, missing, or without effect.
    """
    if find_spec("sklearn") is None:
        raise UserError("metrics need scikit-learn, which is not installed: pip install -r requirements.txt")
    few = RANKED if len(names) <= 5 else ()  # the true class is always among the five likeliest
    asked = tuple(shipped_name(given) or given for given in config.metric_name or ())
    for name in asked:
        if name in few and name in DEFAULT_METRICS[kind]:
            raise UserError(f"--metric_name {name} is always 1 for a model of {len(names)} classes: leave it out")
    metrics = Metrics(multi_label=kind == "multi_label", num_labels=len(names) or 1)
    if not has_evaluate():
        metrics.notes["metrics"] = "computed by scikit-learn and SciPy directly: `evaluate` is not installed"
    for name in asked or [name for name in DEFAULT_METRICS[kind] if name not in few]:
        source = find_source(kind, name, config.trust_remote_code)
        computed = (name,) if shipped_name(source) else try_out(metrics, kind, name, source)
        if both := set(computed) & set(metrics.names):
            raise UserError(
                f"--metric_name {' '.join(asked)}: {min(both)} would be computed twice: name each metric once"
            )
        metrics.sources += (source,)
        metrics.names += computed
    metrics.positive = positive_class(config, kind, names, asked)
    describe(metrics, names, targets)
    return metrics


def try_out(metrics: Metrics, kind: str, name: str, source: str) -> tuple[str, ...]:
    """The names of the values that a metric of the user or from the Hub computes from perfect predictions.

    Raises:
        UserError: the metric cannot be computed.
    """
    sample = np.arange(metrics.num_labels)
    if kind not in ("classification", "image_classification"):
        sample = np.eye(metrics.num_labels, dtype=np.int64) if metrics.multi_label else np.array([0.0, 1.0, 2.0])
    try:
        return tuple(metrics.compute_one(source, predictions=sample, references=sample))
    except Exception as error:  # any error of foreign code is caused by the user's choice of metric
        task = kind if kind == "regression" else f"{kind} with {metrics.num_labels} labels"
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if isinstance(error, NotImplementedError):
            reason = "write `import evaluate`, not `from evaluate import Metric`: the file's first Metric is loaded"
        raise UserError(f"--metric_name {name} cannot be computed for {task}: {reason}") from error


def positive_class(config: Options, kind: str, names: Sequence[str], asked: Sequence[str]) -> int | None:
    """The index of --positive_label in `names`; None where no metric is about one class.

    Raises:
        UserError: --positive_label is unknown, missing, or without effect.
    """
    of_class, label = [name for name in asked if name in OF_CLASS], config.positive_label
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")
    if not of_class:
        if label is not None:
            raise UserError(
                f"--positive_label {label} has no effect: no metric of --metric_name {' '.join(asked)} needs it"
            )
        return None
    if label is None and (len(names) > 2 or kind == "multi_label"):
        raise UserError(f"--metric_name {of_class[0]} needs --positive_label, the class to compute it for: {listed}")
    if label is not None and label not in names:
        raise UserError(f"--positive_label {label} is not a class of the data: use one of {listed}")
    return 1 if label is None else list(names).index(label)


def describe(metrics: Metrics, names: Sequence[str], targets: np.ndarray) -> None:
    """Note which class the metrics are about, and which the validation data `targets` makes undefined or 0."""
    if metrics.positive is None and not metrics.take_scores:
        return
    rows = targets.sum(0) if metrics.multi_label else np.bincount(targets, minlength=len(names))
    if metrics.positive is not None:
        label = names[metrics.positive]
        metrics.notes["positive label"] = label
        if not rows[metrics.positive]:
            why = f"no row of the validation data is of class {label}"
            metrics.notes["note on --positive_label"] = f"{why}: its metrics stay 0"
            metrics.empty |= {name: why for name in metrics.names if name in OF_CLASS}
    without = [name for name, count in zip(names, rows, strict=True) if count in (0, len(targets))]
    if metrics.take_scores and len(without) == len(names):
        why = f"each row of the validation data has the same {'labels' if metrics.multi_label else 'class'}"
        metrics.notes["note on --metric_name"] = f"{', '.join(SCORED)} cannot be computed (NaN): {why}"
        metrics.empty |= dict.fromkeys(SCORED, why)
    elif metrics.take_scores and without:
        metrics.notes["note on --metric_name"] = (
            f"{', '.join(SCORED)} is the mean over {len(names) - len(without)} of {len(names)} classes: the others are "
            f"in none or all rows of the validation data ({', '.join(without[:5])}{', ...' * (len(without) > 5)})"
        )
