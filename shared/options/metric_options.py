"""The settings of the metrics of classification and regression, in addition to those of `ModelOptions`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from shared.config.fields import Meaning
from shared.options.data_options import ModelOptions


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
