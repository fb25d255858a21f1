"""The F1 of all yes-or-no decisions of a multi-label task together."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import f1_score


class MicroF1(evaluate.Metric):
    """`sklearn.metrics.f1_score` with average="micro" of rows of 0 and 1, one column per label.

    It is 0 when no label is predicted or true anywhere (0 / 0). Of class ids it would be the accuracy, so there is no
    such form.
    """

    def _info(self) -> evaluate.MetricInfo:
        feature = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features({"predictions": feature, "references": feature}),
        )

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, float]:
        # Flattened, because scikit-learn takes a matrix with one column for class ids 0 and 1.
        return {"micro_f1": float(f1_score(np.ravel(references), np.ravel(predictions), zero_division=0.0))}
