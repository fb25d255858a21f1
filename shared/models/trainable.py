"""Which parameters of a model train, and the average of them that is evaluated and exported (--ema_decay)."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import numpy as np
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shared.compat import of_torch
from shared.errors import UserError, listed, say
from shared.monitoring.hooks import Hook
from shared.plan.batches import MicroBatch
from shared.run.warm_up import discarded, without_gradient

PASSES, ROWS = 4, 2  # of the search for parameters that no loss reaches; batch norm needs two samples


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
        flag, every = f"--freeze {' '.join(self.patterns)}", [*model.parameters()]
        parameters = dict(model.named_parameters(remove_duplicate=False))  # tied ones under each of their names
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
        sizes = [p.numel() for p in every if not p.requires_grad]
        if len(sizes) == len(every):
            raise UserError(f"{flag} freezes all parameters: leave some to train")
        say(f"{flag}: {sum(sizes):,} of {sum(p.numel() for p in every):,} weights are frozen")


class FreezeUnreached(Hook):
    """Freezes the parameters that the loss does not depend on, such as the unused pooler of a pretrained model.

    A parameter that only some batches use (an expert of a mixture) must not be frozen. It is recognized in two ways:
    other samples use it, or the loss depends on the same parameter of another item in its list of modules.
    """

    def placed(self, run: Any, model: nn.Module) -> None:
        """Freeze the trainable parameters that the loss does not depend on, and print their names.

        The optimizer, which is made later, must not hold them, and DDP waits for the gradient of each parameter that is
        not frozen. Each process computes the same samples, so all freeze the same; so does a resumed run. The backward
        passes also shard the parameters again that FSDP has gathered for earlier forward passes.

        Raises:
            UserError: the loss depends on some parameters only for some batches.
        """
        samples = np.linspace(0, run.plan.num_samples - 1, min(PASSES * ROWS, run.plan.num_samples)).astype(np.int64)

        def unreached(batch: np.ndarray) -> list[str]:
            micro_batch = MicroBatch(0, 0, batch, np.zeros(len(batch), np.int64), len(batch), step_samples=len(batch))
            with discarded(run.accelerator, model):
                run.compute_loss(micro_batch).backward()
                return without_gradient(model)

        first, *others = (samples[i : i + ROWS] for i in range(0, len(samples), ROWS))
        if not (names := unreached(first)):
            return
        varying = {name for batch in others for name in {*names} ^ {*unreached(batch)}}
        reached = [name for name, p in model.named_parameters() if p.requires_grad and name not in names]
        twins = {without_index(name) for name in reached}
        if routed := [
            name for name in (*reached, *names) if name in varying or (name in names and without_index(name) in twins)
        ]:
            raise UserError(
                f"the loss depends on some parameters only for some batches ({listed(routed)}), as in a mixture of "
                "experts: such a model cannot be trained exactly on several processes; if the parameters are never "
                "used, freeze them in build_model (requires_grad_(False))"
            )
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        several = list(dict.fromkeys(map(without_index, names)))
        run.accelerator.print(f"frozen, because the loss does not depend on them: {listed(several)}")


def without_index(name: str) -> str:
    """A parameter's name without the index of its module in a list, so that all items of the list have the same."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


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

    def step_ended(self) -> None:
        """Add the weights of the step; every hook, such as `BatchNorm`, has been told of the update."""
        for hook in self.run.hooks:
            hook.weights_are_read()
        if self.run.progress.step:
            self.move(self.averages, self.values, None)
        else:
            of_torch.copy(self.averages, self.values)
        for hook in self.run.hooks:
            hook.passed("optimizer")

    def evaluate_average(self) -> dict[str, float]:
        """The scores of the average."""
        self.exchange()
        try:
            return self.evaluate()
        finally:
            self.exchange()

    def before_export(self, model: nn.Module) -> None:
        self.exchange()

    def exchange(self) -> None:
        """Exchange the average with the weights of the model."""
        for average, value in zip(self.averages, self.values, strict=True):
            kept = value.clone()
            value.copy_(average)
            average.copy_(kept)


def layers_by_depth(model: nn.Module) -> list[list[nn.Module]]:
    """The items of the outermost lists of two or more modules of one class: an encoder's layers, a ResNet's stages.

    Items of several ModuleLists of one length in a module are one layer, as attention and MLP of an XLM are.
    """
    found: list[list[nn.Module]] = []
    parallel: dict[object, list[list[nn.Module]]] = {}
    for child in model.children():
        layers = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        if len(layers) > 1 and len({type(layer) for layer in layers}) == 1:
            key = len(layers) if isinstance(child, nn.ModuleList) else child
            if key not in parallel:
                found += parallel.setdefault(key, [[] for _ in layers])
            for parts, layer in zip(parallel[key], layers, strict=True):
                parts.append(layer)
        else:
            found += layers_by_depth(child)
    return found


def called_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that have a forward pass: of a stage that is a list, such as that of a PVT, its items."""
    parts = chain.from_iterable(layers_by_depth(model))
    stages = (layer.children() if isinstance(layer, nn.ModuleList) else [layer] for layer in parts)
    return [each for each in chain.from_iterable(stages) if not isinstance(each, nn.ModuleList | nn.ModuleDict)]


def backbone(model: Any) -> nn.Module:
    """The model without its head: the base model, or its largest child if transformers names no base model."""
    if model.base_model is not model:
        return model.base_model
    parts = [part for part in model.children() if not isinstance(part, nn.Linear)]  # for CLIP and SigLIP
    return max(parts, key=lambda part: sum(p.numel() for p in part.parameters()))
