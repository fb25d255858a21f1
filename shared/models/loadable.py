"""Check that `from_pretrained` can load the model that a run will export."""

import copy
from typing import Any

import torch

from shared.errors import UserError


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
