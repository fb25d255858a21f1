"""How the processes of a run hold its model: each has a copy, and DDP sums the gradients."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shared.checkpoints import resuming
from shared.checkpoints.saving import Saver
from shared.processes import barrier


class Ddp:
    """Each process has the whole model. A hook may give `run.strategy` a subclass when the run is `opened`."""

    name = "DDP"
    saver: type[Saver] = Saver
    equal_counts = False
    """Whether every process must compute the same number of micro-batches, because a forward pass communicates."""

    def place(self, accelerator: Any, model: nn.Module) -> None:
        """Move a model to the device, before its optimizer is made. Every process calls each of these methods."""
        model.to(accelerator.device)

    def wrap(self, accelerator: Any, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        """The model and its optimizer as the loop uses them."""
        barrier.wait_for_all(accelerator)  # each machine prepares its data by itself
        return accelerator.prepare(model, optimizer)

    def load(self, path: Path, models: list[nn.Module], optimizers: list[Any], registered: list[Any]) -> None:
        """Load the tensors of a checkpoint; see `resuming.load_tensors`."""
        resuming.load_tensors(path, models, optimizers, registered)

    def weights(self, accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
        """The whole state dict of the model, to export it."""
        return accelerator.get_state_dict(model)
