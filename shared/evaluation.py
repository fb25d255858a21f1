"""Evaluation that counts exactly over any number of processes: each sample once, in dataset order; and its metrics."""

import atexit
import math
import os
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shared import endings
from shared.batches import MicroBatch
from shared.errors import UserError
from shared.launch import on_main_process
from shared.options import Options
from shared.progress import BestBy

METRICS_FOLDER = Path(__file__).parent / "metrics"
# The metrics of each kind of task; the first decides which checkpoint is best.
DEFAULT_METRICS = {
    "classification": ("accuracy", "macro_f1", "matthews_correlation"),
    "image_classification": ("accuracy", "top_5_accuracy", "macro_f1"),
    "multi_label": ("micro_f1", "macro_f1", "accuracy"),
    "regression": ("pearson", "spearman", "mean_squared_error"),
}
RANKED = {"top_5_accuracy"}  # metrics that take the best classes of each sample, not the best one only
LOWER_IS_BETTER = {"loss", "error", "mse", "rmse", "mae", "mape", "perplexity", "wer", "cer"}


def gather_rows(accelerator: Any, indices: np.ndarray | torch.Tensor, rows: torch.Tensor, total: int) -> torch.Tensor:
    """The rows of all processes in dataset order, on every process, each sample counted exactly once.

    Every process calls this once, with the rows it computed. One that computed none brings an empty tensor of the same
    trailing shape and dtype. Batches repeated only to keep processes in step (FSDP) are left out by the caller.
    Accelerate's `gather_for_metrics` is no substitute: with batches of varying size it loses or repeats samples.

    Args:
        accelerator: gives the device and the sum over processes.
        indices: [n] the dataset's sample number of each row.
        rows: [n, ...] float32, float64 or int64; predictions rather than logits, as every process holds the result.
        total: number of samples in the dataset.

    Returns:
        [total, ...] on the accelerator's device, row i that of sample i.

    Raises:
        AssertionError: on every process, when a sample came never or more than once; it names the first one.
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
    """Collects what one process predicts on its share of a dataset, and brings the shares together.

    Args:
        shape: of the predictions for the whole dataset: (samples,) or (samples, labels).
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.samples = [np.empty(0, np.int64)]
        self.rows: list[torch.Tensor] = []

    def add(self, micro_batch: MicroBatch, predictions: torch.Tensor, losses: torch.Tensor) -> None:
        """Take in a micro-batch's predictions [rows] or [rows, labels] and losses [rows]; a repeat is passed over."""
        if micro_batch.counted:
            self.samples.append(micro_batch.samples)
            self.rows.append(torch.cat([losses[:, None], predictions.reshape(len(losses), -1)], dim=1).double())

    def gather(self, accelerator: Any) -> tuple[np.ndarray, np.ndarray]:
        """Predictions and losses of the whole dataset in its order, on every process; call it on all of them."""
        width = 1 + math.prod(self.shape[1:])
        mine = torch.cat(self.rows or [torch.empty(0, width, dtype=torch.float64)])
        rows = gather_rows(accelerator, np.concatenate(self.samples), mine, self.shape[0]).cpu().numpy()
        return rows[:, 1:].reshape(self.shape), rows[:, 0]


def best_by(config: Options, metrics: "Metrics") -> BestBy:
    """Which evaluation number tells the best model: --metric_for_best_model, or the main metric of the task.

    Raises:
        UserError: no evaluation gives a number of that name.
    """
    names = ("loss", *metrics.names)
    name = (config.metric_for_best_model or metrics.main_name).removeprefix("eval_")
    if name not in names:
        raise UserError(f"--metric_for_best_model {name} is not computed: use one of {', '.join(names)}")
    greater = greater_is_better(name) if config.greater_is_better is None else config.greater_is_better
    return BestBy(f"eval_{name}", greater)


@dataclass
class Metrics:
    """What a run is judged by. `evaluate` takes seconds to import: it is loaded when the first value is computed."""

    sources: tuple[str, ...]  # for evaluate.load: files, or one name on the Hub
    config_name: str | None  # "multilabel" for rows of 0 and 1: the name evaluate's own accuracy and f1 have for them
    names: tuple[str, ...]  # of the values
    _modules: list[Any] = field(default_factory=list, init=False, repr=False)

    @property
    def main_name(self) -> str:
        """The default of --metric_for_best_model."""
        return self.names[0]

    def compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        """The values by name, without the prefix "eval_", on the process that calls.

        Args:
            predictions: [n] class ids or numbers, [n, labels] of 0 and 1, or [n, k] class ids, the likeliest first.
            references: the same shape; [n] class ids beside the last.
        """
        assert len(predictions) == len(references), f"predictions {predictions.shape}, references {references.shape}"
        if not self._modules:
            self._modules = [load(source, self.config_name) for source in self.sources]
        values: dict[str, Any] = {}
        first = predictions if predictions.shape == references.shape else predictions[:, 0]
        for source, module in zip(self.sources, self._modules, strict=True):
            given = predictions if Path(source).stem in RANKED else first
            values |= module.compute(predictions=given, references=references)
        return {name: float(value) for name, value in values.items()}


def computed_by_recipe(config: Options, names: tuple[str, ...]) -> Metrics:
    """The metrics of a recipe that computes them itself, the main one first.

    Raises:
        UserError: --metric_name asks for another.
    """
    if config.metric_name:
        raise UserError(
            f"--metric_name {config.metric_name}: this recipe always computes {', '.join(names)}; leave the flag out"
        )
    return Metrics((), None, names)


def compute_on_main(
    accelerator: Any, metrics: Metrics, predictions: np.ndarray, references: np.ndarray
) -> dict[str, float]:
    """`metrics.compute` on the main process, its result on all: a decision made from it (stop, best) is everyone's."""
    return on_main_process(accelerator, lambda: metrics.compute(predictions, references))


def greater_is_better(name: str) -> bool:
    """Whether a larger value of this metric is a better one: not if a word of its name is a loss or an error."""
    return LOWER_IS_BETTER.isdisjoint(name.lower().split("_"))


def resolve(kind: str, metric_name: str | None, trust_remote_code: bool, num_labels: int) -> Metrics:
    """The metrics of a run, checked before it trains. Every process calls this.

    The metrics that come with the recipes are only looked up. One of the user's own or of the Hub is loaded and tried
    on perfect predictions: what would fail after the first epoch (F1 that wants an average) fails here.

    Args:
        kind: "classification", "image_classification", "multi_label" or "regression".
        metric_name: `--metric_name`, the one metric to use: a folder under shared/metrics, a file or a folder NAME
            with NAME.py in it, or a name on the Hub; None for all defaults of this kind.
        trust_remote_code: `--trust_remote_code`, without which nothing is loaded from the Hub.
        num_labels: classes or labels of the task; of no account for regression.

    Raises:
        UserError: there is no such metric, it does not fit, or its code may not or cannot be loaded.
    """
    config_name = "multilabel" if kind == "multi_label" else None
    if missing := [package for package in ("evaluate", "datasets", "sklearn") if find_spec(package) is None]:
        raise UserError(f"metrics need {missing[0]}, which is not installed: pip install -r requirements.txt")
    if metric_name is None or metric_name in DEFAULT_METRICS[kind]:
        names = (metric_name,) if metric_name else DEFAULT_METRICS[kind]
        return Metrics(tuple(str(METRICS_FOLDER / name / f"{name}.py") for name in names), config_name, names)

    metrics = Metrics((find_source(kind, metric_name, trust_remote_code),), config_name, names=())
    classes = np.arange(num_labels)
    perfect = {
        "classification": classes,
        "image_classification": classes,
        "multi_label": np.eye(num_labels, dtype=np.int64),
    }
    sample = perfect.get(kind, np.array([0.0, 1.0, 2.0]))
    try:
        metrics.names = tuple(metrics.compute(sample, sample))
    except Exception as error:  # code that is not ours: whatever it raises, the user's choice of metric is the cause
        task = kind if kind == "regression" else f"{kind} with {num_labels} labels"
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if isinstance(error, NotImplementedError):
            reason = (
                "write `import evaluate`, not `from evaluate import Metric`: its first Metric class is the one loaded"
            )
        raise UserError(f"--metric_name {metric_name} cannot be computed for {task}: {reason}") from error
    return metrics


def find_source(kind: str, metric_name: str, trust_remote_code: bool) -> str:
    """What evaluate.load is given for a metric that is none of the defaults: a file, or a name on the Hub.

    Raises:
        UserError: see `resolve`.
    """
    shipped = {name for names in DEFAULT_METRICS.values() for name in names}
    added = {folder.name for folder in METRICS_FOLDER.iterdir() if (folder / f"{folder.name}.py").is_file()} - shipped
    fitting = ", ".join((*DEFAULT_METRICS[kind], *sorted(added)))
    if metric_name in shipped:
        raise UserError(f"--metric_name {metric_name} does not fit {kind}: use one of {fitting}")
    given = Path(metric_name).expanduser()
    for path in (METRICS_FOLDER / metric_name, given):
        for script in (path / f"{path.resolve().name}.py", path):
            if script.suffix == ".py" and script.is_file():
                return str(script.resolve())
    if given.exists() or given.suffix == ".py" or metric_name.startswith((".", "/", "~")):
        raise UserError(
            f"--metric_name {metric_name}: no metric there; give a .py file, a folder NAME with NAME.py in it, or one "
            f"of {fitting}"
        )
    if not trust_remote_code:
        raise UserError(
            f"--metric_name {metric_name} is not one of {fitting}, nor a file or folder here; a metric from the Hub is "
            "code that will run on this machine: add --trust_remote_code to allow it"
        )
    if (cached := cached_hub_script(metric_name)) is None:
        from shared.hub import require_hub

        require_hub("--metric_name", metric_name)
    return cached or metric_name


def cached_hub_script(name: str) -> str | None:
    """The newest copy of a Hub metric that `evaluate` kept on this machine: it needs no network."""
    import evaluate

    owner, _, metric = name.rpartition("/")
    metrics = Path(evaluate.config.HF_MODULES_CACHE, "evaluate_modules", "metrics")
    copies = metrics.glob(f"{owner or 'evaluate-metric'}--{metric}/*/{metric}.py")
    return max(map(str, copies), key=os.path.getmtime, default=None)


def load(source: str, config_name: str | None) -> Any:
    """An `evaluate.Metric` that keeps its rows in memory and so shares no file or lock with another run.

    `evaluate` imports a copy of the file from a cache in the user's home. That may be read-only, or hold another user's
    locks; for a local file the copy goes to a temporary folder of this process instead, unless the process has already
    imported metrics from elsewhere.
    """
    import evaluate

    if not Path(source).is_file():
        return evaluate.load(source, config_name=config_name, module_type="metric", keep_in_memory=True)
    if "evaluate_modules" not in sys.modules:
        copies = tempfile.mkdtemp(prefix="evaluate-")
        endings.temporary.append(Path(copies))
        atexit.register(endings.clean_up)
        evaluate.config.HF_MODULES_CACHE = copies
    with tempfile.TemporaryDirectory() as unused:  # it makes a folder for rows even where it keeps them in memory
        return evaluate.load(
            source, config_name=config_name, module_type="metric", keep_in_memory=True, cache_dir=unused
        )
