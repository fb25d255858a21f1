"""What a recipe requires of a model, checked before training."""

import copy
from typing import Any

import torch
from torch import nn

from shared.errors import UserError


def frozen_models(model: nn.Module) -> list[str]:
    """The names of whole models inside a model that are frozen, but in training mode, such as a teacher.

    Parts of a model with adapters are frozen as well, and are none.
    """
    if hasattr(model, "merge_adapters"):
        return []
    return [
        name
        for name, module in model.named_modules()
        if name and hasattr(module, "save_pretrained") and module.training and any(True for _ in module.parameters())
        if not any(parameter.requires_grad for parameter in module.parameters())
    ]


def check_names(model: torch.nn.Module) -> None:
    """Check that a transformers model has the weights of its class, so that `from_pretrained` can load its export.

    Raises:
        UserError: a weight was added or removed; the message names it.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        return
    with torch.device("meta"):
        own: Any = type(model)
        expected = set(own(copy.deepcopy(model.config)).state_dict())
    found = set(model.state_dict())
    if changed := sorted(found ^ expected):
        what = "has" if changed[0] in found else "lacks"
        raise UserError(
            f"build_model: a {type(model).__name__} that {what} {changed[0]} ({len(changed)} weights differ) could be "
            "exported, but from_pretrained would not load it as trained: change the model's class, or return a "
            "torch.nn.Module of your own that contains the model"
        )
