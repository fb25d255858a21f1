"""What changes the training loss of a classifier: weights of its classes, and smoothed labels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.config.limits import Limits
from shared.config.text_options import TextOptions
from shared.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LossOptions(TextOptions):
    """The settings of it."""

    class_weights: tuple[str, ...] | None = None
    """Weight of each class in the training loss: balanced, or numbers in the order of the labels. None: all alike."""
    label_smoothing: Annotated[float, Limits(least=0, below=1)] = 0.0
    """Share of the target that is spread over all classes. The evaluation's loss stays without it."""


@dataclass(frozen=True)
class LossShape:
    """What the training loss of a run is made with. The evaluation's loss is made without it.

    As in torch.nn.CrossEntropyLoss, the loss of a global batch is the sum of its samples' weighted losses divided by
    the sum of their weights. `Plan` divides by that sum when it is given `sample_weights`.
    """

    cross_entropy: dict[str, Any] = field(default_factory=dict)  # arguments of F.cross_entropy beside reduction="none"
    sample_weights: NDArray[np.float64] | None = None  # [N] that of each training sample's class; None: 1 each
    notes: dict[str, str] = field(default_factory=dict)  # for the launch card


def shape_of_run(
    config: LossOptions, kind: str, names: Sequence[str], targets: NDArray[Any], device: torch.device
) -> LossShape:
    """What --class_weights and --label_smoothing make of the loss for the training data's `targets`.

    Args:
        config: the settings.
        kind: of task, "classification", "multi_label" or "regression".
        names: of the classes, in the order of the model's outputs.
        targets: [N] class ids of the training data; of another kind of task, anything.
        device: where the logits will be.

    Raises:
        UserError: a setting does not fit the task, or the weights do not fit the classes.
    """
    given = {"class_weights": " ".join(config.class_weights or ()), "label_smoothing": config.label_smoothing}
    for name, value in given.items():
        if value and kind != "classification":
            task = "regression has no classes" if kind == "regression" else "here a text has several labels"
            raise UserError(f"--{name} {value} is for one label of several, and {task}: leave it out")
    arguments: dict[str, Any] = {"label_smoothing": config.label_smoothing} if config.label_smoothing else {}
    if config.class_weights is None:
        return LossShape(arguments)
    weights = torch.tensor(class_weights(config.class_weights, names, targets), dtype=torch.float32)
    shown = [f"{name} {weight:.3g}" for name, weight in zip(names, weights.tolist(), strict=True)]
    note = ", ".join(shown[:10]) + (f" and {len(shown) - 10:,} more" if len(shown) > 10 else "")
    arguments["weight"] = weights.to(device)
    return LossShape(arguments, weights.double().numpy()[targets], {"class weights": note})


def class_weights(given: Sequence[str], names: Sequence[str], targets: NDArray[np.int64]) -> list[float]:
    """The weight of each class, as --class_weights `given` says.

    balanced: samples / (classes * samples of the class), as in scikit-learn.

    Raises:
        UserError: these are no weights, or not one for each class.
    """
    flag = f"--class_weights {' '.join(given)}"
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10:,} more" if len(names) > 10 else "")
    if list(given) == ["balanced"]:
        counts = np.bincount(targets, minlength=len(names))
        if not counts.all():
            raise UserError(
                f"{flag}: the training data has no row of class {names[int(counts.argmin())]}, whose weight would be "
                "infinite: give a number for each class"
            )
        return [float(weight) for weight in len(targets) / (len(names) * counts)]
    try:
        weights = [float(word) for word in given]
    except ValueError:
        raise UserError(f"{flag}: expected balanced, or a number for each class ({listed})") from None
    if len(weights) != len(names):
        raise UserError(f"{flag}: {len(weights)} weights for {len(names)} classes: give one for each ({listed})")
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise UserError(f"{flag}: each weight must be above 0")
    return weights
