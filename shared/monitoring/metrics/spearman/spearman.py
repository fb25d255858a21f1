"""Spearman's correlation: how alike predictions and references are in order."""

import datasets
import evaluate
import numpy as np
from scipy.stats import spearmanr


class Spearman(evaluate.Metric):
    """`scipy.stats.spearmanr` of numbers.

    Where all predictions, or all references, are the same (or there is one sample only) SciPy says NaN with a warning;
    here it is 0, as in scikit-learn's Matthews correlation: a constant predicts nothing. NaN means that a prediction is
    not finite.
    """

    def _info(self) -> evaluate.MetricInfo:
        feature = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features({"predictions": feature, "references": feature}),
        )

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        predicted, true = np.asarray(predictions), np.asarray(references)
        if not np.isfinite(predicted).all():
            return {"spearman": float("nan")}
        if np.ptp(predicted) == 0 or np.ptp(true) == 0:
            return {"spearman": 0.0}
        return {"spearman": float(spearmanr(true, predicted).statistic)}
