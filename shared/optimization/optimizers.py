"""Parameter groups, optimizers, learning-rate schedules, and optimizer steps that skip non-finite gradients."""

import math
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from shared.compat import of_torch
from shared.config.options import Options, ScheduleType
from shared.errors import UserError, listed
from shared.optimization import gradients

Schedule = Callable[[int], float]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: with weight decay, and without (one dimension: biases and norms)."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(
    model: nn.Module, config: Options, groups: list[dict[str, Any]] | None = None
) -> torch.optim.Optimizer:
    """Make the optimizer of --optim, AdamW or SGD, which are fused: one kernel per step.

    `groups` are the parameters; None: `parameter_groups`.
    """
    groups, rate = groups or parameter_groups(model, config.weight_decay), config.base_learning_rate()
    if config.optim == "sgd":
        sgd = torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True, fused=True)
        sgd.register_step_pre_hook(begin_momentum)
        return sgd
    betas, epsilon = adam(config, beta2=0.999, epsilon=1e-8)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, fused=True)


def require_all(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Check that an optimizer has the trainable parameters of a model and no others, and nothing that a run would lose.

    Raises:
        UserError: names what would never be trained, or would be lost.
    """
    groups, own = optimizer.param_groups, {id(parameter) for parameter in model.parameters()}
    held = {id(parameter): parameter for group in groups for parameter in group["params"]}
    if missing := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]:
        raise UserError(
            f"make_optimizer: the optimizer does not have {listed(missing)}, which would never be trained: add them, "
            "or freeze them in build_model (requires_grad_(False))"
        )
    if foreign := [f"shape {[*p.shape]}" for key, p in held.items() if key not in own]:
        raise UserError(
            f"make_optimizer: the optimizer has parameters that the model does not have ({listed(foreign)}): they "
            "would be neither clipped, saved nor synchronized; make them parameters of the model"
        )
    if lost := [key for key in optimizer.state_dict() if key not in ("state", "param_groups")]:
        raise UserError(
            f"make_optimizer: a checkpoint would lose {listed(lost)} of the optimizer's state_dict: keep this in its "
            "state or its groups"
        )
    if hasattr(optimizer, "eval"):
        raise UserError(
            "make_optimizer: an optimizer with eval(), such as a schedule-free one, is not supported: use another"
        )
    rates = dict.fromkeys(str(group.get("lr")) for group in groups if "lr_scale" not in group)
    if len(rates) > 1:
        raise UserError(
            f"make_optimizer: the learning rates of the groups ({listed(list(rates))}) would be lost, because the "
            "schedule sets that of each step: give a group its factor as lr_scale (docs/own_models.md)"
        )
    vars(optimizer)["groups_made"] = len(groups)  # for set_learning_rate


def adam(config: Options, beta2: float, epsilon: float) -> tuple[tuple[float, float], float]:
    """AdamW's betas and epsilon: the values of the flags, or the defaults 0.9, `beta2` and `epsilon`."""
    given = config.adam_beta1, config.adam_beta2, config.adam_epsilon
    beta1, beta2, epsilon = (
        default if value is None else value for value, default in zip(given, (0.9, beta2, epsilon), strict=True)
    )
    return (beta1, beta2), epsilon


def begin_momentum(sgd: torch.optim.Optimizer, *_: Any) -> None:
    """Set the momentum to zeros before the first step; this does not change the result of that step.

    If the device skips the first step (`step_if_finite`, GradScaler), the kernel leaves the momentum that torch 2.13
    allocated uninitialized, and the next step would use it.
    """
    parameters = [parameter for group in sgd.param_groups for parameter in group["params"]]
    if parameters and parameters[0] not in sgd.state:  # other optimizers of a chain may have a state already
        for parameter in parameters:
            sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def warmup_steps(config: Options, total_steps: int) -> int:
    """The number of warm-up steps: --warmup_steps, or --warmup_ratio of all steps; none before a decay at the start."""
    if config.decay_start is not None:
        return 0
    return config.warmup_steps or math.ceil((config.warmup_ratio or 0.0) * total_steps)


SCHEDULES: dict[ScheduleType, Callable[[float, float], float]] = {
    "linear": lambda left, last: left,
    "cosine": lambda left, last: 0.5 * (1 - math.cos(math.pi * left)),
    "polynomial": lambda left, last: left**2,
    "constant": lambda left, last: 1.0,
    "warmup_stable_decay": lambda left, last: 1 - math.sqrt(1 - last),
}
"""The learning rate after the warm-up, as a share of its peak. `left` is the share of the steps after the warm-up that
are left, and `last` that of the last `decay_ratio` of all steps, 1 before them. warmup_stable_decay decays as 1 - sqrt
(Hägele et al., arXiv:2405.18392)."""


def make_schedule(config: Options, total_steps: int) -> Schedule:
    """The learning rate as a pure function of the step (0 ... total_steps-1), without state to save.

    Warm-up is linear and reaches the peak at step `warmup_steps`; SCHEDULES has what follows.
    """
    peak = config.peak_learning_rate()
    warmup = warmup_steps(config, total_steps)
    decay_steps = max(1, total_steps - warmup)
    last_steps = min(decay_steps, max(1.0, total_steps * (0.2 if config.decay_ratio is None else config.decay_ratio)))
    if config.decay_start is not None:
        last_steps = total_steps - config.decay_start

    def schedule(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        left = max(0.0, 1 - (step - warmup) / decay_steps)
        last = min(1.0, max(0.0, (total_steps - step) / last_steps))
        return peak * SCHEDULES[config.lr_scheduler_type](left, last)

    return schedule


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of all parameter groups, multiplied by the `lr_scale` of a group that has one.

    Raises:
        UserError: a scheduler object sets it, too, or the optimizer got a parameter group after `require_all`.
    """
    own, groups = vars(inner(optimizer)), optimizer.param_groups
    of, rates = own.get("rates_set", (None, None))
    changed = of is groups and rates != [group["lr"] for group in groups]  # `load_state_dict` makes another list
    if changed or len(groups) > own.get("groups_made", len(groups)) or any("initial_lr" in group for group in groups):
        raise UserError(  # most schedulers of torch.optim add initial_lr
            "a scheduler object sets the learning rate, or the optimizer has a new group: a resumed run would begin "
            "without either; give the rate to set_learning_rate, and all groups to make_optimizer (docs/own_models.md)"
        )
    for group in groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)
    own["rates_set"] = groups, [group["lr"] for group in groups]


def inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer under Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def step_if_finite(accelerator: Accelerator, optimizer: torch.optim.Optimizer, grad_norm: Tensor) -> Tensor:
    """Do one optimizer step, or skip it on all processes if the norm of the gradients is not finite.

    `grad_norm` belongs to the synchronized gradients, so it is the same on every process. Returns 1.0 on the device
    if the update was skipped, else 0.0; the host does not wait for it. Accelerate's `step_was_skipped` is always False
    with fused optimizers (accelerate#4242).
    """
    on_host = grad_norm.device.type == gradients.HOST
    skipped = torch.tensor(float(not math.isfinite(grad_norm))) if on_host else (~torch.isfinite(grad_norm)).float()
    optimizer = inner(optimizer)  # Accelerate's wrapper looks for a package on the disk in each step
    if accelerator.scaler is not None:
        accelerator.scaler.step(optimizer)  # it also found this when it unscaled the gradients; it skips and backs off
        accelerator.scaler.update()
    elif not on_host and of_torch.reads_found_inf(optimizer):
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():
        optimizer.step()
    if grad_norm.device.type != accelerator.device.type:  # parameters on the host
        skipped = skipped.to(accelerator.device, non_blocking=True)
    return skipped
