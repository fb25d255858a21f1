"""Of the samples predicted to be of one class, the share that is."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import precision_score


class PrecisionOfClass(evaluate.Metric):
    """`sklearn.metrics.precision_score` of class ids, the class `pos_label` against all others; 0 where it is 0 / 0.

    With config_name="multilabel", of rows of 0 and 1, one column per label, of which `pos_label` is one.
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

    def _compute(self, predictions: list[int], references: list[int], pos_label: int = 1) -> dict[str, float]:
        predicted, true = np.asarray(predictions), np.asarray(references)
        if self.config_name == "multilabel":
            predicted, true = predicted[:, pos_label] == 1, true[:, pos_label] == 1
        else:
            predicted, true = predicted == pos_label, true == pos_label
        return {"precision_of_class": float(precision_score(true, predicted, zero_division=0.0))}
