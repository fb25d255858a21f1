"""Class weights and label smoothing in the training loss of a classifier."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.config.fields import Limits
from shared.errors import UserError, listed
from shared.options.text_options import TextOptions


@dataclass(frozen=True, kw_only=True)
class LossOptions(TextOptions):
    """The flags of the training loss."""

    class_weights: tuple[str, ...] | None = None
    """Weight of each class in the training loss: balanced, or numbers in the order of the labels. None: all equal."""
    label_smoothing: Annotated[float, Limits(least=0, below=1)] = 0.0
    """Share of each target that is spread evenly over all classes. The evaluation loss does not use it."""


class SampleWeights:
    """The weight of each training sample, which is that of its class; N weights are never in memory.

    Args:
        of_classes: float64 [classes].
        targets: int64 [N] class ids, which may be memory-mapped.
    """

    def __init__(self, of_classes: NDArray[np.float64], targets: NDArray[np.int64]) -> None:
        self.of_classes, self.targets = of_classes, targets

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
        UserError: a value is not a positive number, their number is not that of the classes, or a class has no samples.
    """
    flag = f"--class_weights {' '.join(given)}"
    classes = listed(names, 10)
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
        raise UserError(f"{flag}: expected balanced, or a number for each class ({classes})") from None
    if len(weights) != len(names):
        raise UserError(f"{flag}: {len(weights)} weights for {len(names)} classes: give one for each ({classes})")
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise UserError(f"{flag}: each weight must be above 0")
    return weights
