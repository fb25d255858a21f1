"""The parts of a model: its repeated layers, and the model without its head."""

from typing import Any

from torch import nn

from shared.compat import of_torch

SHORT = "last_layer_is_short"  # attribute of a model, see `is_short`


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost lists of two or more modules of one class, flattened: an encoder's layers, a ResNet's stages."""
    found: list[nn.Module] = []
    for child in model.children():
        layers = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        if len(layers) > 1 and len({type(layer) for layer in layers}) == 1:
            found += layers
        else:
            found += repeated_layers(child)
    return found


def compiled(model: nn.Module) -> bool:
    """Whether some layers of a model are compiled. Hooks inside compiled layers do not run."""
    return any(of_torch.is_compiled(module) for module in model.modules())


def is_short(model: nn.Module) -> bool:
    """Whether the last layer computes only the tokens that the head reads: the first ones, or masked ones."""
    return getattr(model, SHORT, False)


def backbone(model: Any) -> nn.Module:
    """The model without its head: the base model, or its largest child if transformers names no base model."""
    if model.base_model is not model:
        return model.base_model
    parts = [part for part in model.children() if not isinstance(part, nn.Linear)]  # for CLIP and SigLIP
    return max(parts, key=lambda part: sum(p.numel() for p in part.parameters()))
