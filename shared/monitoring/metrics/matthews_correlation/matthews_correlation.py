"""The correlation of predicted and true classes: 1 is perfect, 0 is no better than a constant guess."""

import datasets
import evaluate

from shared.monitoring import metric_functions


class MatthewsCorrelation(evaluate.Metric):
    """Class ids; the value is 0 when predictions or references are all the same."""

    def _info(self) -> evaluate.MetricInfo:
        feature = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features({"predictions": feature, "references": feature}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        return {"matthews_correlation": metric_functions.matthews_correlation(predictions, references)}
