"""The area under the ROC curve: how often a sample of a class scores higher for it than a sample of another class."""

import datasets
import evaluate
import numpy as np

from shared.monitoring import metric_functions


class RocAuc(evaluate.Metric):
    """Probabilities [n, classes] and class ids.

    Of two classes, the value is that of the second; of more, the mean over them, each against all others. With
    config_name="multilabel" references are rows of 0 and 1, one column per label, and it is the mean over the labels.
    A class that no sample or every sample has is left out of the mean. NaN means that no class is left, or that a
    probability is not finite.
    """

    def _info(self) -> evaluate.MetricInfo:
        label = datasets.Value("int64")
        references = datasets.Sequence(label) if self.config_name == "multilabel" else label
        info = evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features(
                {"predictions": datasets.Sequence(datasets.Value("float32")), "references": references}
            ),
        )
        info.format = "numpy"  # lists would take ten times the memory; the constructor allows it for plain values only
        return info

    def _compute(self, predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
        return {"roc_auc": metric_functions.roc_auc(predictions, references)}
