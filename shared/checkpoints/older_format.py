"""Reads checkpoints of the format before `optimizer.safetensors`, which Accelerate's `save_state` writes as well."""

from pathlib import Path
from typing import Any

import torch

from shared.optimization.optimizers import inner


def is_in(path: Path) -> bool:
    """Whether a checkpoint that is not sharded has the older format."""
    return (path / "optimizer.bin").exists()


def load(path: Path, optimizers: list[Any], registered: list[Any]) -> None:
    """Load all but the models. Only weights and plain values are unpickled.

    Raises:
        OSError: a file cannot be read.
        RuntimeError, ValueError: it belongs to other objects, or is no file of torch.save.
    """
    for i, optimizer in enumerate(optimizers):
        inner(optimizer).load_state_dict(read(path / f"optimizer{f'_{i}' if i else ''}.bin"))
    for i, each in enumerate(registered):
        each.load_state_dict(read(path / f"custom_checkpoint_{i}.pkl"))


def read(file: Path) -> Any:
    """What torch.save wrote to a file, on the CPU."""
    return torch.load(file, map_location="cpu", weights_only=True)
