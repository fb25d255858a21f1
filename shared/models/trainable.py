"""Which parameters of a model train, and the average that is evaluated and exported: --freeze and --ema_decay."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shared.compat import of_torch
from shared.errors import UserError, listed, say
from shared.monitoring.hooks import Hook


class Frozen(Hook):
    """Freezes the parameters that --freeze names, before the run looks at the model, and prints how many values.

    A pattern names a module or a parameter at any depth: `embeddings`, `layers.0`, `layers.[0-5]`, `*.bias`. Wildcards
    are those of `fnmatch`. Frozen modules keep their dropout, and frozen batch norms still update their statistics.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = patterns

    def given(self, run: Any, model: nn.Module) -> None:
        """Freeze the parameters that one of the patterns names.

        Raises:
            UserError: a pattern names no parameter, or all parameters would be frozen.
        """
        parameters, flag = dict(model.named_parameters()), f"--freeze {' '.join(self.patterns)}"
        for pattern in self.patterns:
            found = [name for name in parameters if fnmatchcase(f".{name}.", f"*.{pattern}.*")]
            if not found:
                modules = [name for name, module in model.named_modules() if name and name.count(".") < 2]
                raise UserError(
                    f"--freeze {pattern}: no parameter of the {type(model).__name__} has such a name: its modules are "
                    f"{listed(modules)}"
                )
            for name in found:
                parameters[name].requires_grad_(False)
        sizes = [p.numel() for p in parameters.values() if not p.requires_grad]
        if len(sizes) == len(parameters):
            raise UserError(f"{flag} freezes all parameters: leave some to train")
        total = sum(p.numel() for p in parameters.values())
        say(f"{flag}: {sum(sizes):,} of {total:,} weights are frozen")


class WeightAverage(Hook):
    """An exponential moving average of what a step changes: parameters that train, and buffers that hooks average.

    Evaluations and the export see it in the model, which trains on with its own weights; checkpoints hold both. Each
    step keeps the share `decay` of it. It begins with the weights after the first step.
    """

    def __init__(self, decay: float) -> None:
        self.move = get_ema_multi_avg_fn(decay)

    def prepared(self, run: Any) -> None:
        """Let checkpoints hold the average, and evaluations see it."""
        model = run.accelerator.unwrap_model(run.model)
        buffers = {id(buffer) for hook in run.hooks for buffer in hook.averaged_buffers(model)}
        self.run, self.values, average = run, [], nn.Module()
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.requires_grad or (id(tensor) in buffers and tensor.is_floating_point()):
                self.values.append(tensor.detach())
                average.register_buffer(name.replace(".", ":"), self.values[-1].clone())  # torch allows no dots
        self.averages, self.evaluate, run.evaluate = [*average.buffers()], run.evaluate, self.evaluate_average
        run.accelerator.register_for_checkpointing(average)

    def updated(self, grad_norm: Tensor) -> None:
        self.run.weights_are_read()
        if self.run.progress.step:
            self.move(self.averages, self.values, None)
        else:
            of_torch.copy(self.averages, self.values)

    def evaluate_average(self) -> dict[str, float]:
        """The scores of the average."""
        self.exchange()
        results = self.evaluate()
        self.exchange()
        return results

    def before_export(self, model: nn.Module) -> None:
        self.exchange()

    def exchange(self) -> None:
        """Exchange the average with the weights of the model."""
        for average, value in zip(self.averages, self.values, strict=True):
            kept = value.clone()
            value.copy_(average)
            average.copy_(kept)


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost lists of two or more modules of one class, flattened: an encoder's layers, a ResNet's stages."""
    found: list[nn.Module] = []
    for child in model.children():
        layers = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        if len(layers) > 1 and len({type(layer) for layer in layers}) == 1:
            found += layers
        else:
            found += repeated_layers(child)
    return found


def is_short(model: nn.Module) -> bool:
    """Whether the last layer computes only the tokens that the head reads: the first ones, or masked ones."""
    return getattr(model, "last_layer_is_short", False)


def backbone(model: Any) -> nn.Module:
    """The model without its head: the base model, or its largest child if transformers names no base model."""
    if model.base_model is not model:
        return model.base_model
    parts = [part for part in model.children() if not isinstance(part, nn.Linear)]  # for CLIP and SigLIP
    return max(parts, key=lambda part: sum(p.numel() for p in part.parameters()))
