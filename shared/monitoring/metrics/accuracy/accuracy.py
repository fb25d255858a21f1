"""The share of samples whose prediction equals their reference."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import accuracy_score


class Accuracy(evaluate.Metric):
    """`sklearn.metrics.accuracy_score` of class ids.

    With config_name="multilabel", of rows of 0 and 1, one column per label: a row counts only if all its labels are
    right (subset accuracy).
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
        return {"accuracy": float(accuracy_score(np.asarray(references), np.asarray(predictions)))}
