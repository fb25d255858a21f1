"""A second model that is never trained, such as a teacher."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn


class FrozenModel:
    """A model in eval mode and without gradients, on the device of the run.

    It is no `nn.Module`. A model that has one as an attribute therefore does not train, shard, save or export it. Its
    forward pass uses the precision of the run. Frozen weights are not part of a checkpoint, so a resumed run loads
    them again: its own name is a setting of the run, which a resumed run must repeat.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module) -> None:
        self.accelerator = accelerator
        self.model: Any = model.to(accelerator.device).eval().requires_grad_(False)

    def __call__(self, *args: Any, **arguments: Any) -> Any:
        """The output of the model."""
        with torch.no_grad(), self.accelerator.autocast():
            return self.model(*args, **arguments)
