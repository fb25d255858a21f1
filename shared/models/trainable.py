"""Which parameters of a model train, and how fast: --freeze and --layer_lr_decay."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from shared.errors import UserError, listed, say
from shared.models.layers import repeated_layers
from shared.models.transformers_models import frozen_models
from shared.monitoring.hooks import Hook


class Frozen(Hook):
    """Freezes the parameters of --freeze before the run looks at the model."""

    def given(self, run: Any, model: nn.Module) -> None:
        """Freeze them, and note models that are frozen but in training mode."""
        if frozen := frozen_models(model):
            run.card["note on frozen models"] = (
                f"{listed(frozen)} has dropout and is in each checkpoint: wrap a model that only teaches in FrozenModel"
            )
        freeze(model, run.config.freeze)


def freeze(model: nn.Module, patterns: Sequence[str] | None) -> None:
    """Freeze the parameters that one of the patterns names, and print how many values are frozen.

    A pattern names a module or a parameter at any depth: `embeddings`, `layers.0`, `layers.[0-5]`, `*.bias`. Wildcards
    are those of `fnmatch`. Frozen modules keep their dropout, and frozen batch norms still update their statistics.

    Raises:
        UserError: a pattern names no parameter, or all parameters would be frozen.
    """
    parameters = dict(model.named_parameters())
    for pattern in patterns or ():
        found = [name for name in parameters if fnmatchcase(f".{name}.", f"*.{pattern}.*")]
        if not found:
            modules = [name for name, module in model.named_modules() if name and name.count(".") < 2]
            raise UserError(
                f"--freeze {pattern}: no parameter of the {type(model).__name__} has such a name: its modules are "
                f"{listed(modules)}"
            )
        for name in found:
            parameters[name].requires_grad_(False)
    if patterns:
        sizes = [p.numel() for p in parameters.values() if not p.requires_grad]
        if len(sizes) == len(parameters):
            raise UserError(f"--freeze {' '.join(patterns)} freezes all parameters: leave some to train")
        total = sum(p.numel() for p in parameters.values())
        say(f"--freeze {' '.join(patterns)}: {sum(sizes):,} of {total:,} weights are frozen")


def rates_by_layer(model: nn.Module, groups: list[dict[str, Any]], decay: float | None) -> list[dict[str, Any]]:
    """Split an optimizer's parameter groups by layer; `lr_scale` of a group multiplies the learning rate.

    The last of L layers has the scale `decay`, the one below it `decay` squared, and so on. Embeddings, and everything
    else that the model registers before its first layer, have `decay` to the power L + 1; the rest (head, pooler, last
    norm) has 1. Sources: Howard and Ruder,
    arXiv:1801.06146; Clark et al. (ELECTRA), arXiv:2003.10555. None returns the groups unchanged.

    Raises:
        UserError: the model has no list of layers.
    """
    if decay is None:
        return groups
    scales = scales_by_layer(model, decay)
    split = []
    for group in groups:
        members: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            members.setdefault(scales.get(id(parameter), 1.0), []).append(parameter)
        split += [{**group, "params": found, "lr_scale": scale} for scale, found in members.items()]
    return split


def scales_by_layer(model: nn.Module, decay: float) -> dict[int, float]:
    """{id of a parameter in or below the layers: factor of its learning rate}; see `rates_by_layer`."""
    layers = repeated_layers(model)
    if not layers:
        raise UserError(
            f"--layer_lr_decay {decay:g}: a {type(model).__name__} has no list of layers of one kind: leave it out"
        )
    scales = {
        id(parameter): decay ** (len(layers) - index)
        for index, layer in enumerate(layers)
        for parameter in layer.parameters()
    }
    first = min(place for place, parameter in enumerate(model.parameters()) if id(parameter) in scales)
    below = [p for place, (name, p) in enumerate(model.named_parameters()) if place < first or "embed" in name]
    return {id(parameter): decay ** (len(layers) + 1) for parameter in below} | scales
