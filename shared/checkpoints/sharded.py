"""The files of a checkpoint whose model is sharded over processes (FSDP2): torch's distributed checkpoint.

Each process writes its own shard. The folders have the names and layout of Accelerate's, so Accelerate can read them.
Any number of processes can read them.
"""

import errno
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared.optimization.optimizers import inner


def is_sharded(model: nn.Module) -> bool:
    """Whether torch's `fully_shard` has sharded a model, even if all of its parameters are gathered at the moment."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(model, FSDPModule)


def is_in(path: Path) -> bool:
    """Whether a checkpoint was saved from sharded models."""
    return (path / "pytorch_model_fsdp_0").is_dir()


def save(path: Path, models: list[nn.Module], optimizers: list[Any]) -> None:
    """Write and fsync this process's shard; call it on every process.

    Raises:
        OSError: on all processes, if one of them could not write.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    for name, state in _states(models, optimizers).items():
        try:
            checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(path / name))
        except CheckpointException as error:  # derived from BaseException
            rank, (cause, _) = next(iter(error.failures.items()))
            number, text = getattr(cause, "errno", None) or errno.EIO, getattr(cause, "strerror", None) or cause
            raise OSError(number, f"process {rank}: {text}") from None


def load(path: Path, models: list[nn.Module], optimizers: list[Any]) -> None:
    """Read this process's part, whatever the number of processes that wrote it; call it on every process.

    Models and optimizers that are not sharded are read as a whole.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

    states = _states(models, optimizers)
    for name, state in states.items():
        checkpoint.load(state, storage_reader=checkpoint.FileSystemReader(path / name), planner=_safe_planner())
    for i, model in enumerate(models):
        set_model_state_dict(model, states[f"pytorch_model_fsdp_{i}"]["model"])
    for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        set_optimizer_state_dict(model, inner(optimizer), states[f"optimizer_{i}"]["optimizer"])


def is_mine(file: Path, rank: int) -> bool:
    """Whether process `rank` wrote a file of a checkpoint: its own shards, and on rank 0 all other files."""
    owner = file.name.split("_")[2] if file.suffix == ".distcp" else "0"
    return int(owner) == rank


def _states(models: list[nn.Module], optimizers: list[Any]) -> dict[str, dict[str, Any]]:
    """The state dicts by folder; their tensors are those of the models and optimizers."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    states = {f"pytorch_model_fsdp_{i}": {"model": get_model_state_dict(model)} for i, model in enumerate(models)}
    return states | {
        f"optimizer_{i}": {"optimizer": get_optimizer_state_dict(model, inner(optimizer))}
        for i, (model, optimizer) in enumerate(zip(models, optimizers, strict=True))
    }


def _safe_planner() -> Any:
    """torch's planner, which unpickles any object, restricted to weights and plain values."""
    from torch.distributed.checkpoint import DefaultLoadPlanner

    class SafePlanner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            torch.load(value, weights_only=True)
            value.seek(0)
            super().load_bytes(read_item, value)

    return SafePlanner()
