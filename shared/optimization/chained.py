"""Several optimizers as one: the loop, clipping, skipped updates, checkpoints and FSDP see a single optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shared.compat import of_torch
from shared.errors import UserError, listed


class ChainedOptimizers(torch.optim.Optimizer):
    """Optimizers that make their steps one after the other.

    It has the parameter groups of all of them, and one state, so its state dict has the format of one optimizer.

    Raises:
        ValueError: two optimizers have the same parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        of_torch.declare_found_inf(self, all(map(of_torch.reads_found_inf, optimizers)))
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of each optimizer; the device skips it if `found_inf` is set, as in fused optimizers."""
        loss = closure() if closure else None
        for each in self.optimizers:
            for name in ("grad_scale", "found_inf"):  # set by torch's GradScaler and by `step_if_finite`
                setattr(each, name, getattr(self, name, None))
            each.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As in the base class, which `load_state_dict` calls with a new state and new groups."""
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Make the optimizers use the state and the groups of this one."""
        begin = 0
        for each in self.optimizers:
            groups = self.param_groups[begin : begin + len(each.param_groups)]
            begin += len(groups)
            each.__setstate__({"state": self.state, "param_groups": groups})


def as_one(optimizers: Any, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `model` that `make_optimizer` returned; several are chained.

    Raises:
        UserError: a trainable parameter is in none of them, so it would never be trained.
    """
    several = isinstance(optimizers, Sequence)
    optimizer = ChainedOptimizers(optimizers) if several else optimizers
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]:
        raise UserError(
            f"make_optimizer: no optimizer has {listed(missing)}, which would never be trained: add them to an "
            "optimizer, or freeze them in build_model (requires_grad_(False))"
        )
    return optimizer


def trained_by(optimizer: torch.optim.Optimizer) -> str:
    """`1,290 trained by sgd, 330 by adamw`: the number of parameters of each optimizer."""
    found: list[str] = []
    for each in getattr(optimizer, "optimizers", [optimizer]):
        values = sum(p.numel() for group in each.param_groups for p in group["params"])
        found.append(f"{values:,}{'' if found else ' trained'} by {type(each).__name__.lower()}")
    return ", ".join(found)
