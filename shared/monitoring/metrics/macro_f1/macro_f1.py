"""The mean of the classes' F1, each class counting alike however rare it is."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import f1_score


class MacroF1(evaluate.Metric):
    """`sklearn.metrics.f1_score` of class ids with average="macro", over the classes that occur in either argument.

    With config_name="multilabel", of rows of 0 and 1, one column per label: the mean of all labels' F1. The F1 of a
    label that is neither predicted nor true anywhere, 0 / 0, is 0.
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
        predicted, true = np.asarray(predictions), np.asarray(references)
        if self.config_name != "multilabel":
            return {"macro_f1": float(f1_score(true, predicted, average="macro", zero_division=0.0))}
        # Label by label, because scikit-learn takes a matrix with one column for class ids 0 and 1.
        pairs = zip(true.T, predicted.T, strict=True)
        return {"macro_f1": float(np.mean([f1_score(*pair, zero_division=0.0) for pair in pairs]))}
