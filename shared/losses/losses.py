"""The training loss: class weights and label smoothing of a classifier, standardized targets of regression."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shared.datasets.label_columns import FINEST, FLAG
from shared.datasets.labels import Labels
from shared.errors import UserError, listed
from shared.monitoring.hooks import Hook
from shared.pretrained.from_pretrained import label_weights

ORDINARY_MEAN, ORDINARY_DEVIATION = 10.0, (0.1, 10.0)  # targets that a model learns without standardization


@dataclass(frozen=True)
class SampleWeights:
    """The weight of each training sample, which is that of its class; N weights are never in memory."""

    of_classes: NDArray[np.float64]  # [classes]
    targets: NDArray[np.int64]  # [N] class ids, which may be memory-mapped

    def __getitem__(self, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        return self.of_classes[self.targets[samples]]


@dataclass(frozen=True)
class LossShape:
    """The class weights and label smoothing of a run's training loss. The evaluation loss does not use them.

    As in torch.nn.CrossEntropyLoss, the loss of a global batch is the sum of its samples' weighted losses divided by
    the sum of their weights. `Plan` divides by that sum if it is given `sample_weights`. If images are mixed, torch
    divides the sum by the number of samples, and there are no `sample_weights`.
    """

    cross_entropy: dict[str, Any] = field(default_factory=dict)  # for F.cross_entropy, besides reduction="none"
    sample_weights: SampleWeights | None = None  # class weight of each training sample; None: 1 each
    notes: dict[str, str] = field(default_factory=dict)  # lines of the launch card


def shape_of_run(
    config: Any, kind: str, names: Sequence[str], targets: NDArray[Any], device: torch.device
) -> LossShape:
    """The loss shape that --class_weights and --label_smoothing give for the training data's `targets`.

    Args:
        config: the flags; images also have --mixup and --cutmix.
        kind: of the task, "classification", "multi_label" or "regression".
        names: class names in the order of the model's outputs.
        targets: [N] class ids of the training data; not used for other kinds of tasks.
        device: device of the logits.

    Raises:
        UserError: a flag does not fit the task, or the weights do not fit the classes.
    """
    given = {"class_weights": " ".join(config.class_weights or ()), "label_smoothing": config.label_smoothing}
    for name, value in given.items():
        if value and kind != "classification":
            task = "regression has no classes" if kind == "regression" else "here a text can have several"
            raise UserError(f"--{name} {value} requires exactly one label per sample, but {task}: leave it out")
    arguments: dict[str, Any] = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
    if config.class_weights is None:
        return LossShape(arguments)
    weights = torch.tensor(class_weights(config.class_weights, names, targets), dtype=torch.float32)
    shown = [f"{name} {weight:.3g}" for name, weight in zip(names, weights.tolist(), strict=True)]
    arguments["weight"] = weights.to(device)
    mixed = getattr(config, "mixup", 0) or getattr(config, "cutmix", 0)
    return LossShape(
        arguments,
        None if mixed else SampleWeights(weights.double().numpy(), targets),
        {"class weights": listed(shown, 10)},
    )


def class_weights(given: Sequence[str], names: Sequence[str], targets: NDArray[np.int64]) -> list[float]:
    """The weight of each class for the value `given` of --class_weights.

    For balanced: samples / (classes * samples of the class), as in scikit-learn.

    Raises:
        UserError: there is not one positive number for each class, or a class has no samples.
    """
    flag = f"--class_weights {' '.join(given)}"
    if list(given) == ["balanced"]:
        counts = np.bincount(targets, minlength=len(names))
        if not counts.all():
            raise UserError(
                f"{flag}: the training data has no sample of class {names[int(counts.argmin())]}, whose weight would "
                "be infinite: give a number for each class"
            )
        return [float(weight) for weight in len(targets) / (len(names) * counts)]
    try:
        weights = [float(word) for word in given]
    except ValueError:
        weights = []
    if len(weights) != len(names) or not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise UserError(f"{flag}: give balanced, or a number above 0 for each class ({listed(names, 10)})")
    return weights


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
        mean, spread = float(targets.mean()), float(targets.std())
        deviation = spread or 1.0
        column = f"{FLAG} {labels.columns[0]}"
        said = f"{column}: the training targets have mean {mean:.6g} and standard deviation {deviation:.4g}"
        step = float(np.spacing(np.float32(np.abs(targets).max())))
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
            f"It answers in units of `{self.labels.columns[0]}`. It was trained on (value - {self.mean:.10g}) / "
            f"{self.deviation:.10g}, and its last layer has been scaled back."
        )


def last_layer(model: Any) -> nn.Linear | None:
    """The linear layer with a bias that makes the model's output; None if there is no such layer, or it is unknown."""
    if not hasattr(model, "config"):
        return None
    names = label_weights(model)
    path = names[0].rpartition(".")[0] if names else ""
    layer = model.get_submodule(path)
    found = isinstance(layer, nn.Linear) and sorted(names) == [f"{path}.bias", f"{path}.weight"]
    return layer if found else None
