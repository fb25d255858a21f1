"""Standardized targets for regression; after training, the scale is put back into the model's last layer."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shared.datasets.label_cells import BLOCK, FINEST
from shared.datasets.labels import FLAG, Labels
from shared.errors import UserError
from shared.monitoring.hooks import Hook
from shared.pretrained.from_pretrained import label_weights

ORDINARY_MEAN, ORDINARY_DEVIATION = 10.0, (0.1, 10.0)  # targets that a model learns without standardization


@dataclass(frozen=True)
class Scale(Hook):
    """Mean and standard deviation of the training targets; the identity for tasks other than regression."""

    labels: Labels
    mean: float = 0.0
    deviation: float = 1.0
    layer: nn.Linear | None = None  # the model's last layer; None: no scaling

    def __str__(self) -> str:
        if self.layer is None:
            return ""
        return f", standardized (mean {self.mean:.4g}, standard deviation {self.deviation:.4g})"

    @classmethod
    def of_run(cls, labels: Labels, targets: np.ndarray, model: Any) -> "Scale":
        """The scale of the training targets [N]. Call this before `prepare`.

        If the last layer was already trained on these targets, its weights are standardized here.

        Raises:
            UserError: the targets need scaling but the last layer cannot be scaled, or float32, the dtype of the
                model's outputs, is too coarse for them.
        """
        if labels.kind != "regression":
            return cls(labels)
        mean, spread, largest = moments(targets)
        deviation = spread or 1.0
        said = (
            f"{FLAG} {labels.column}: the training targets have mean {mean:.6g} and standard deviation {deviation:.4g}"
        )
        step = float(np.spacing(np.float32(largest)))
        if spread and step * FINEST > deviation:
            raise UserError(
                f"{said}, but float32, the dtype of a model's outputs, has steps of {step:.2g} there: subtract "
                f"{mean:.6g} from the column"
            )
        if (layer := last_layer(model)) is None:
            if abs(mean) > ORDINARY_MEAN or not ORDINARY_DEVIATION[0] <= deviation <= ORDINARY_DEVIATION[1]:
                raise UserError(
                    f"{said}, but a {type(model).__name__} does not end in a linear layer with a bias, which could "
                    "undo a standardization: subtract the mean from the column and divide by the deviation"
                )
            return cls(labels)
        if getattr(model, "knows_labels", False):
            with torch.no_grad():
                layer.weight.div_(deviation)
                layer.bias.sub_(mean).div_(deviation)
        return cls(labels, mean, deviation, layer)

    def standardize(self, targets: Tensor) -> Tensor:
        """Targets [rows] for the loss: standardized to mean 0 and deviation 1, float32; other tasks: unchanged."""
        return ((targets - self.mean) / self.deviation).float() if self.labels.kind == "regression" else targets

    def restore(self, predictions: Tensor) -> Tensor:
        """Outputs of the model in training, converted to units of the targets, float64; other tasks: unchanged."""
        if self.labels.kind != "regression":
            return predictions
        return predictions.double() * self.deviation + self.mean

    def before_export(self, model: nn.Module) -> None:
        """Scale the last layer so that the model answers in units of the targets.

        `model` is the one that `prepare` returned.
        """
        if self.layer is None:
            return
        for module in model.modules():
            if reshard := getattr(module, "reshard", None):
                reshard()  # FSDP2: otherwise a gathered copy would be scaled, not the exported weights
        with torch.no_grad():
            self.layer.weight.mul_(self.deviation)
            self.layer.bias.mul_(self.deviation).add_(self.mean)

    @property
    def note(self) -> str:  # type: ignore[override]
        """The text about the scale in the model card; empty without one."""
        if self.layer is None:
            return ""
        return (
            f"It answers in units of `{self.labels.column}`. It was trained on (value - {self.mean:.10g}) / "
            f"{self.deviation:.10g}, and its last layer has been scaled back."
        )


def moments(targets: np.ndarray) -> tuple[float, float, float]:
    """The mean, the standard deviation and the largest absolute value of numbers [N], which may be memory-mapped."""

    def blocks() -> Iterator[np.ndarray]:
        for start in range(0, len(targets), BLOCK):
            yield targets[start : start + BLOCK].astype(np.float64)

    mean = sum(float(block.sum()) for block in blocks()) / len(targets)
    variance = sum(float(np.square(block - mean).sum()) for block in blocks()) / len(targets)
    return mean, variance**0.5, max(float(np.abs(block).max()) for block in blocks())


def last_layer(model: Any) -> nn.Linear | None:
    """The linear layer with a bias that makes the model's output; None if there is no such layer, or it is unknown."""
    if not hasattr(model, "config"):
        return None
    names = label_weights(model)
    path = names[0].rpartition(".")[0] if names else ""
    layer = model.get_submodule(path)
    found = isinstance(layer, nn.Linear) and sorted(names) == [f"{path}.bias", f"{path}.weight"]
    return layer if found else None
