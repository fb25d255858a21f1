"""FSDP2 in a run: the hook by which settings allow it, and what it does in another way than DDP."""

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shared.compat import of_fsdp
from shared.errors import UserError
from shared.fsdp import checkpoints
from shared.fsdp.sharding import shard
from shared.monitoring.hooks import Hook
from shared.processes import barrier
from shared.processes.rules import uses_fsdp
from shared.run.ddp import Ddp


class Sharding(Hook):
    """Shards the model of a run that was launched with FSDP. Others can resume from the checkpoints of such a run."""

    def opened(self, run: Any) -> None:
        """Choose how the processes hold the model."""
        run.strategy = Fsdp() if uses_fsdp(os.environ) else Whole()
        if uses_fsdp(os.environ) and run.accelerator.device.type == "cpu":
            of_fsdp.use_fsdp_on_cpu(run.accelerator)


class Whole(Ddp):
    """DDP, which also reads sharded checkpoints."""

    def load(self, path: Path, models: list[nn.Module], optimizers: list[Any], registered: list[Any]) -> None:
        """Load the tensors of a checkpoint of either kind."""
        if checkpoints.is_in(path):
            checkpoints.load(path, models, optimizers)
        else:
            super().load(path, models, optimizers, registered)


class Fsdp(Ddp):
    """Each process has a shard of each parameter, of its gradient and of its optimizer state."""

    name = "FSDP2"
    saver = checkpoints.ShardedSaver
    equal_counts = True

    def place(self, accelerator: Any, model: nn.Module) -> None:
        """Shard the model, which also moves it to the device."""
        shard(accelerator, model)

    def wrap(self, accelerator: Any, model: nn.Module, optimizer: Any) -> tuple[Any, Any]:
        """As in DDP; the model is sharded already, and Accelerate only adds autocast."""
        barrier.wait_for_all(accelerator)
        return accelerator.prepare_model(model, evaluation_mode=True), accelerator.prepare_optimizer(optimizer)

    def load(self, path: Path, models: list[nn.Module], optimizers: list[Any], registered: list[Any]) -> None:
        """Load this process's part of a sharded checkpoint.

        Raises:
            UserError: the checkpoint is not sharded.
        """
        if not checkpoints.is_in(path):
            raise UserError(
                f"{path} was saved without FSDP and cannot be resumed with it: start without "
                "accelerate_configs/fsdp.yaml, or begin a new run in another --output_dir"
            )
        checkpoints.load(path, models, optimizers)

    def weights(self, accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
        """The gathered weights, with one tensor under all names of a tied parameter; FSDP gathers one for each name."""
        weights = super().weights(accelerator, model)
        first: dict[int, str] = {}
        names = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in accelerator.unwrap_model(model).named_parameters(remove_duplicate=False)
        }
        return {name: weights[names.get(name, name)] for name in weights}
