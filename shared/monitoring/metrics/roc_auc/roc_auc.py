"""The area under the ROC curve: how often a sample of a class has a higher probability of it than one of the others."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import roc_auc_score


class RocAuc(evaluate.Metric):
    """`sklearn.metrics.roc_auc_score` of probabilities [n, classes] and class ids, of two classes the second.

    Of more classes it is the mean over them, each against all others (multi_class="ovr", average="macro"). With
    config_name="multilabel" references are rows of 0 and 1, one column per label, and it is the mean over the labels.
    A class that no sample has, or every sample, has no curve and is left out of the mean. NaN means that none has one,
    or that a probability is not finite.
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
        scores, true = np.asarray(predictions), np.asarray(references)
        if not np.isfinite(scores).all():
            return {"roc_auc": float("nan")}
        if self.config_name != "multilabel":
            true = true[:, None] == np.arange(scores.shape[1])
            if scores.shape[1] == 2:
                scores, true = scores[:, 1:], true[:, 1:]
        # Class by class, because scikit-learn refuses a class without samples.
        curves = [roc_auc_score(t, s) for t, s in zip(true.T, scores.T, strict=True) if np.ptp(t.astype(int))]
        return {"roc_auc": float(np.mean(curves)) if curves else float("nan")}
