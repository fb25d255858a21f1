"""Metrics of the `evaluate` library that --metric_name names: files, folders, and names on the Hub."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import UserError, about

ForeignFunction = Callable[[NDArray[Any], NDArray[Any]], dict[str, float]]  # of predictions and references


def load_foreign(
    metric_name: str, kind: str, num_labels: int, shipped: Sequence[str], trust_remote_code: bool
) -> tuple[ForeignFunction, tuple[str, ...]]:
    """A metric that is not shipped: a function of `predictions` and `references`, and the names of its values.

    It is tried on perfect predictions: one that would fail after the first epoch (F1 without an average) fails here.
    Its rows stay in memory, so it shares no file with another run.

    Args:
        metric_name: a .py file, a folder NAME with NAME.py in it, or a name on the Hub.
        kind: "classification", "image_classification", "multi_label" or "regression".
        num_labels: classes or labels; 1 for regression.
        shipped: names of the shipped metrics that fit the task, for the errors.
        trust_remote_code: whether code from the Hub may run.

    Raises:
        UserError: there is no such metric, it cannot be computed, or its code needs --trust_remote_code.
    """
    unknown = f"--metric_name {metric_name} is not one of {', '.join(shipped)}"
    given = Path(metric_name).expanduser()
    script = given if given.suffix == ".py" else given / f"{given.resolve().name}.py"
    here = script.is_file()
    if not here and not trust_remote_code:
        raise UserError(
            f"{unknown}, nor a .py file or a folder NAME with NAME.py here; a metric from the Hub is code that will "
            "run on this machine: add --trust_remote_code to allow it"
        )
    sample: NDArray[Any] = np.arange(num_labels)
    if kind == "multi_label":
        sample = np.eye(num_labels, dtype=np.int64)
    elif kind == "regression":
        sample = np.array([0.0, 1.0, 2.0])
    task = kind if kind == "regression" else f"{kind} with {num_labels} labels"
    with about(f"--metric_name {metric_name} cannot be computed for {task}"):
        import evaluate

        # Rows of 0 and 1 have the name that evaluate's own accuracy and f1 have for them.
        metric = evaluate.load(
            str(script.resolve()) if here else metric_name,
            config_name="multilabel" if kind == "multi_label" else None,
            module_type="metric",
            keep_in_memory=True,
        )

        def compute(predictions: NDArray[Any], references: NDArray[Any]) -> dict[str, float]:
            values = metric.compute(predictions=predictions, references=references)
            return {name: float(value) for name, value in values.items()}

        return compute, tuple(compute(sample, sample))
