"""The F1 of all yes-or-no decisions of a multi-label task together."""

import datasets
import evaluate

from shared.monitoring import metric_functions


class MicroF1(evaluate.Metric):
    """Rows of 0 and 1, one column per label. Of class ids it would be the accuracy, so it does not take them."""

    def _info(self) -> evaluate.MetricInfo:
        feature = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__class__.__doc__,
            features=datasets.Features({"predictions": feature, "references": feature}),
        )

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict[str, float]:
        return {"micro_f1": metric_functions.micro_f1(predictions, references)}
