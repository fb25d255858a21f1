"""The metrics of a task, for tests."""

from typing import Any

import numpy as np

from shared.metrics.task_metrics import TaskMetrics, resolve_metrics
from shared.options.data_options import MetricOptions


def resolve(kind: str, *names: str, classes: int = 2, targets: Any = None, **settings: Any) -> TaskMetrics:
    """The metrics `names` of a task with classes a, b, c, ...; by default, each has one row in the validation data."""
    config = MetricOptions(metric_name=names or None, **settings)
    if targets is None:
        targets = np.eye(classes) if kind == "multi_label" else np.arange(classes)
    return resolve_metrics(config, kind, tuple("abcdefghij"[:classes]), np.asarray(targets))
