"""The F1 of one class: the harmonic mean of its precision and its recall."""

import datasets
import evaluate

from shared.monitoring import metric_functions


class F1OfClass(evaluate.Metric):
    """Class ids, the class `pos_label` against all others; the value is 0 where it is 0 / 0.

    With config_name="multilabel" rows of 0 and 1, one column per label, of which `pos_label` is one.
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
        return {"f1_of_class": metric_functions.f1_of_class(predictions, references, pos_label)}
