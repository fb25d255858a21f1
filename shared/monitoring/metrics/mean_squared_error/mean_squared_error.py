"""The mean of the squared differences of predictions and references."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import mean_squared_error


class MeanSquaredError(evaluate.Metric):
    """`sklearn.metrics.mean_squared_error` of numbers; NaN when a prediction is not finite (scikit-learn raises)."""

    def _info(self) -> evaluate.MetricInfo:
        feature = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features({"predictions": feature, "references": feature}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        if not np.isfinite(predictions).all():
            return {"mean_squared_error": float("nan")}
        return {"mean_squared_error": float(mean_squared_error(np.asarray(references), np.asarray(predictions)))}
