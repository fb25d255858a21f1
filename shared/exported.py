"""Whether the model that a run exports is the one that `from_pretrained` makes of its files."""

import copy
from pathlib import Path
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


def check_loads(folder: Path, model: torch.nn.Module) -> None:
    """Load the model that `save_pretrained` wrote to `folder`, without memory for its weights: 0.1 s for BERT base.

    Only transformers itself knows which names it writes, which it leaves out because they are tied, and which it reads.
    A model that transformers does not load is passed over.

    Raises:
        UserError: a weight of the model is not in the files, or the files have one that is none of the model's.
    """
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel
    from transformers.utils import logging

    if not isinstance(model, PreTrainedModel):
        return
    # fully_shard makes a class of its own of each model's, which is first in the order of its bases.
    own: Any = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # its table of names would be as long as the model
    try:
        _, found = own.from_pretrained(folder, device_map="meta", output_loading_info=True, local_files_only=True)
    finally:
        logging.set_verbosity(verbosity)
    wrong = {kind: sorted(map(str, found[f"{kind}_keys"])) for kind in ("missing", "unexpected", "mismatched")}
    if any(wrong.values()):
        said = ", ".join(f"{len(names)} {kind} ({names[0]})" for kind, names in wrong.items() if names)
        raise UserError(
            f"the model to be exported would not load as it was trained, of its weights {said}: have build_model "
            "return the model as transformers makes it; the checkpoints are kept, and model/ was not written"
        )
