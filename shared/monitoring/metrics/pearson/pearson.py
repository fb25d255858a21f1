"""Pearson's correlation: how close the pairs of prediction and reference are to a straight line."""

import datasets
import evaluate

from shared.monitoring import metric_functions


class Pearson(evaluate.Metric):
    """Numbers; the value is 0 when one side is constant and NaN when a prediction is not finite."""

    def _info(self) -> evaluate.MetricInfo:
        feature = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features({"predictions": feature, "references": feature}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return {"pearson": metric_functions.pearson(predictions, references)}
