"""Several optimizers as one: the loop, clipping, skipped updates, checkpoints and FSDP see a single optimizer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shared.compat import of_torch


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
