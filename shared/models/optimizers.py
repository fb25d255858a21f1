"""The optimizers of models with layers: rates by layer, LARS and Muon, several as one, and decays from a checkpoint."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared.checkpoints.resuming import problem_with, read_state
from shared.compat import of_torch, of_torch_models
from shared.config import options
from shared.errors import UserError, about
from shared.models.trainable import backbone, layers_by_depth
from shared.monitoring.hooks import Hook
from shared.optimization import optimizers
from shared.optimization.optimizers import adam, parameter_groups
from shared.processes.collectives import on_writers


def make_optimizer(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """Make the optimizer of --optim, with the rates of --layer_lr_decay; `config` is a `ModelOptions`.

    LARS and Muon come from pytorch_optimizer, which depends on torch and NumPy only. Torch has no LARS, and its Muon
    does not support convolutions; timm has both but depends on torchvision.

    Raises:
        UserError: see `muon_groups` and `rates_by_layer`.
    """
    grouped = muon_groups if config.optim == "muon" else parameter_groups
    groups = rates_by_layer(model, grouped(model, config.weight_decay), config.layer_lr_decay)
    rate = config.base_learning_rate()
    if config.optim == "lars":
        from pytorch_optimizer import LARS

        return LARS(groups, lr=rate, momentum=0.9)
    if config.optim == "muon":
        from pytorch_optimizer import Muon

        betas, epsilon = adam(config, beta2=0.95, epsilon=1e-10)
        return Muon(groups, lr=rate, use_adjusted_lr=True, adamw_lr=rate, adamw_betas=betas, adamw_eps=epsilon)
    return optimizers.make_optimizer(model, config, groups)


def muon_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in three groups: Muon for matrices and kernels of hidden layers, AdamW for the rest.

    AdamW updates the first layers ("embeddings", "embedder") and the head, as in Jordan et al. ("Muon", 2024). Both use
    the same learning rate: Muon's is scaled to AdamW's (Liu et al., "Muon is Scalable for LLM Training").

    Raises:
        UserError: the model does not tell its backbone from its head.
    """
    with about("--optim muon, which must know the head of a model"):
        inside = {id(p) for p in backbone(model).parameters()}
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    hidden = {name for name, p in trainable if p.ndim >= 2 and id(p) in inside and "embed" not in name}
    outer = [p for name, p in trainable if name not in hidden]
    groups = [
        {"params": [p for name, p in trainable if name in hidden], "weight_decay": weight_decay, "use_muon": True},
        {"params": [p for p in outer if p.ndim >= 2], "weight_decay": weight_decay, "use_muon": False},
        {"params": [p for p in outer if p.ndim < 2], "weight_decay": 0.0, "use_muon": False},
    ]
    return [group for group in groups if group["params"]]


def rates_by_layer(model: nn.Module, groups: list[dict[str, Any]], decay: float | None) -> list[dict[str, Any]]:
    """Split an optimizer's parameter groups by layer; `lr_scale` of a group multiplies the learning rate.

    The last of L layers has the scale `decay`, the one below it `decay` squared, and so on. What the model registers
    between two layers has the scale of the lower one. Embeddings, and everything else before the first layer, have
    `decay` to the power L + 1; what follows the last one (head, pooler, last norm) has 1. Sources: Howard and Ruder,
    arXiv:1801.06146; Clark et al. (ELECTRA), arXiv:2003.10555. None returns the groups unchanged.

    Raises:
        UserError: the model has no list of layers.
    """
    if decay is None:
        return groups
    if not (layers := layers_by_depth(model)):
        raise UserError(
            f"--layer_lr_decay {decay:g}: a {type(model).__name__} has no list of layers of one kind: leave it out"
        )
    depths = {id(p): depth for depth, parts in enumerate(layers) for part in parts for p in part.parameters()}
    last = max(place for place, parameter in enumerate(model.parameters()) if id(parameter) in depths)
    scales, depth = {}, -1
    for place, (name, parameter) in enumerate(model.named_parameters()):
        depth = depths.get(id(parameter), depth if place < last else len(layers))
        lowest = "embed" in name and id(parameter) not in depths
        scales[id(parameter)] = decay ** (len(layers) - (-1 if lowest else depth))
    split = []
    for group in groups:
        members: dict[float, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            members.setdefault(scales[id(parameter)], []).append(parameter)
        split += [{**group, "params": found, "lr_scale": scale} for scale, found in members.items()]
    return split


class ChainedOptimizers(torch.optim.Optimizer):
    """Optimizers that make their steps one after the other.

    It has the parameter groups of all of them, and one state, so its state dict has the format of one optimizer.

    Raises:
        ValueError: two optimizers have the same parameter.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        for each in optimizers:
            self.state.update(each.state)  # some begin with one
        of_torch_models.declare_found_inf(self, all(map(of_torch.reads_found_inf, optimizers)))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of each optimizer; the device skips it if `found_inf` is set, as in fused optimizers."""
        loss, begin = closure() if closure else None, 0
        for each in self.optimizers:
            end = begin + len(each.param_groups)
            # `load_state_dict` gives this object another state and other groups.
            each.state, each.param_groups, begin = self.state, self.param_groups[begin:end], end
            for name in ("grad_scale", "found_inf"):  # set by torch's GradScaler and by `step_if_finite`
                setattr(each, name, getattr(self, name, None))
            each.step()
        return loss


# --decay_from

# The settings that may differ between both runs, and what the new run begins without.
DECAY_OR_END = ("num_train_epochs", "max_train_steps", "lr_scheduler_type", "decay_ratio", "decay_from")
NONE_YET: dict[str, Any] = {"best_step": None, "best_results": {}, "evaluations_since_best": 0, "run_id": None}


def step_of(checkpoint: str) -> int:
    """The step of a checkpoint, from its name.

    Raises:
        UserError: it is not the name of a checkpoint.
    """
    step = Path(checkpoint).name.removeprefix("step_")
    if not step.isdecimal():
        raise UserError(f"--decay_from {checkpoint}: expected a folder such as out/checkpoints/step_00000200")
    return int(step)


class DecayFrom(Hook):
    """Gives a new run the checkpoint --decay_from, and requires that its decay begins there."""

    begins = False  # whether this start is at the checkpoint of the other run

    def opened(self, run: Any) -> None:
        self.run, self.flag = run, f"--decay_from {run.config.decay_from}"

    def first_checkpoint(self) -> tuple[Path, dict[str, Any]]:
        """The checkpoint, and its state with a best model and a tracker of its own.

        Raises:
            UserError: the checkpoint is missing or damaged, or has the name of another step.
        """
        config, self.begins = self.run.config, True
        path = Path(config.decay_from)

        def read() -> dict[str, Any]:
            if problem := problem_with(path):
                raise UserError(f"{self.flag}: {problem}")
            state = read_state(path)
            if (step := state["step"]) != config.decay_start:
                raise UserError(f"{self.flag} is the checkpoint of step {step}: give it back its name")
            return state

        state = on_writers(self.run.accelerator, config, read)[0]
        own = options.plain(config)
        settings = state["config"] | {name: own[name] for name in DECAY_OR_END}
        return path, state | NONE_YET | {"evaluated_at_end": False, "config": settings}

    def given(self, run: Any, model: nn.Module) -> None:
        """Check that the run goes on, and that the last step before the checkpoint had the peak learning rate.

        Raises:
            UserError: the run ends there, or that step had another rate, or none is known.
        """
        if run.plan.total_steps <= run.config.decay_start:
            raise UserError(f"{self.flag}: the run ends at step {run.plan.total_steps}: give it more steps")
        rate, peak = run.progress.learning_rate, run.config.peak_learning_rate()
        if self.begins and rate != peak:
            raise UserError(
                f"{self.flag}: its last step had a learning rate of {rate}, and the peak is {peak}: name a checkpoint "
                "after the warm-up and before the decay"
            )
