"""The share of samples whose reference is among the five likeliest classes."""

import datasets
import evaluate

from shared.monitoring import metric_functions


class Top5Accuracy(evaluate.Metric):
    """Predictions are lists of class ids, the likeliest first, of which the first five count."""

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features({"predictions": datasets.Sequence(label), "references": label}),
        )

    def _compute(self, predictions: list[list[int]], references: list[int]) -> dict[str, float]:
        return {"top_5_accuracy": metric_functions.top_5_accuracy(predictions, references)}
