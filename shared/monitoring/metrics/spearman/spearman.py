"""Spearman's correlation: how similar the order of the predictions is to that of the references."""

import datasets
import evaluate

from shared.monitoring import metric_functions


class Spearman(evaluate.Metric):
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
        return {"spearman": metric_functions.spearman(predictions, references)}
