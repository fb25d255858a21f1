"""Whether the model that a run exports is the one that `from_pretrained` makes of its files."""

import copy
from typing import Any

import torch

from shared.errors import UserError


def check_names(model: torch.nn.Module) -> None:
    """Refuse, before it trains, a transformers model that was changed so that `from_pretrained` would not load it.

    Raises:
        UserError: names a weight that was added or replaced.
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
            f"build_model: a {type(model).__name__} that {what} {changed[0]} ({len(changed)} weights differ) would be "
            "exported, and from_pretrained would not load it as it was trained: change the model's class, or return a "
            "torch.nn.Module that holds the model and has a forward of its own"
        )
