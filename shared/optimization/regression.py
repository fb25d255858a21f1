"""Regression on numbers of any size: standardized while a model trains, and scaled back into its last layer."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared.datasets.labels import FLAG, Labels
from shared.errors import UserError
from shared.pretrained.from_pretrained import label_weights

ORDINARY_MEAN, ORDINARY_DEVIATION = 10.0, (0.1, 10.0)  # what a model learns without being scaled
FINEST = 100  # steps of float32 in a standard deviation that an exported model needs at least


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of the training targets; for labels that are no numbers, nothing happens."""

    labels: Labels
    mean: float = 0.0
    deviation: float = 1.0
    layer: nn.Linear | None = None  # the model's last

    def __str__(self) -> str:
        if self.layer is None:
            return ""
        return f", standardized (mean {self.mean:.4g}, standard deviation {self.deviation:.4g})"

    @classmethod
    def of_run(cls, labels: Labels, targets: np.ndarray, model: Any) -> "Scale":
        """The scale of the training targets [N]. A last layer that already gives such numbers is divided by it.

        Call it before `prepare`.

        Raises:
            UserError: the model's last layer cannot be scaled, and these targets need it; or float32, in which a model
                answers, cannot tell them apart.
        """
        if labels.kind != "regression":
            return cls(labels)
        numbers = targets.astype(np.float64)
        mean, deviation = float(numbers.mean()), float(numbers.std()) or 1.0
        said = (
            f"{FLAG} {labels.column}: the training targets have mean {mean:.6g} and standard deviation {deviation:.4g}"
        )
        step = float(np.spacing(np.float32(np.abs(numbers).max())))
        if numbers.std() and step * FINEST > deviation:
            raise UserError(
                f"{said}, but float32, in which a model answers, has steps of {step:.2g} there: subtract {mean:.6g} "
                "from the column"
            )
        if (layer := last_layer(model)) is None:
            if abs(mean) > ORDINARY_MEAN or not ORDINARY_DEVIATION[0] <= deviation <= ORDINARY_DEVIATION[1]:
                raise UserError(
                    f"{said}, but a {type(model).__name__} does not end in a linear layer with a bias, into which that "
                    "can be put back: subtract the one from the column and divide by the other"
                )
            return cls(labels)
        if getattr(model, "knows_labels", False):
            with torch.no_grad():
                layer.weight.div_(deviation)
                layer.bias.sub_(mean).div_(deviation)
        return cls(labels, mean, deviation, layer)

    def standardize(self, targets: Tensor) -> Tensor:
        """Targets as the loss takes them: numbers [rows] in units of the standard deviation, float32."""
        return ((targets - self.mean) / self.deviation).float() if self.labels.kind == "regression" else targets

    def restore(self, predictions: Tensor) -> Tensor:
        """What a model in training says, in units of the targets: [rows] float64."""
        return predictions if self.layer is None else predictions.double() * self.deviation + self.mean

    def put_back(self, model: nn.Module) -> None:
        """Have the model itself, as `prepare` returned it, answer in units of the targets. It is trained no more."""
        if self.layer is None:
            return
        for module in model.modules():
            if reshard := getattr(module, "reshard", None):
                reshard()  # FSDP2: else a gathered copy would be scaled, and not what is exported
        with torch.no_grad():
            self.layer.weight.mul_(self.deviation)
            self.layer.bias.mul_(self.deviation).add_(self.mean)

    @property
    def note(self) -> str:
        """What the model card says about it."""
        if self.layer is None:
            return ""
        return (
            f"It answers in units of `{self.labels.column}`. It was trained on (value - {self.mean:.10g}) / "
            f"{self.deviation:.10g}, and its last layer has been scaled back."
        )


def last_layer(model: Any) -> nn.Linear | None:
    """The linear layer with a bias that gives the model's output; None where it ends otherwise, or cannot be known."""
    if not hasattr(model, "config"):
        return None
    names = label_weights(model)
    path = names[0].rpartition(".")[0] if names else ""
    layer = model.get_submodule(path)
    found = isinstance(layer, nn.Linear) and sorted(names) == [f"{path}.bias", f"{path}.weight"]
    return layer if found else None
