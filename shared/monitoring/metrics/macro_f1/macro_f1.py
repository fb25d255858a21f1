"""The mean of the F1 of all classes; each class has the same weight, however rare it is."""

import datasets
import evaluate

from shared.monitoring import metric_functions


class MacroF1(evaluate.Metric):
    """Class ids, of which those that occur in either argument count; an F1 of 0 / 0 is 0.

    With config_name="multilabel" rows of 0 and 1, one column per label: the mean is over all labels.
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
        return {"macro_f1": metric_functions.macro_f1(predictions, references)}
