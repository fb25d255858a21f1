"""The share of samples whose prediction equals their reference."""

import datasets
import evaluate

from shared.monitoring import metric_functions


class Accuracy(evaluate.Metric):
    """Class ids; with config_name="multilabel" rows of 0 and 1, one column per label.

    A row counts only if all its labels are right (subset accuracy).
    """

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        feature = datasets.Sequence(label) if self.config_name == "multilabel" else label
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features({"predictions": feature, "references": feature}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"accuracy": metric_functions.accuracy(predictions, references)}
