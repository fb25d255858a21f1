"""The mean of the squared differences of predictions and references."""

import datasets
import evaluate

from shared.monitoring import metric_functions


class MeanSquaredError(evaluate.Metric):
    """Numbers; the value is NaN when a prediction is not finite."""

    def _info(self) -> evaluate.MetricInfo:
        feature = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features({"predictions": feature, "references": feature}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        return {"mean_squared_error": metric_functions.mean_squared_error(predictions, references)}
