"""The correlation of predicted and true classes: 1 is perfect, 0 no better than a constant guess."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import matthews_corrcoef


class MatthewsCorrelation(evaluate.Metric):
    """`sklearn.metrics.matthews_corrcoef` of class ids, which is 0 when predictions or references are all the same."""

    def _info(self) -> evaluate.MetricInfo:
        feature = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features({"predictions": feature, "references": feature}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        predicted, true = np.asarray(predictions), np.asarray(references)
        if np.ptp(predicted) == 0 or np.ptp(true) == 0:  # scikit-learn's value as well, but with a warning
            return {"matthews_correlation": 0.0}
        return {"matthews_correlation": float(matthews_corrcoef(true, predicted))}
