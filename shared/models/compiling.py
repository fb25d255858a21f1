"""`--torch_compile`: the repeated layers of a model, each compiled in place, so that all of a kind share their code."""

import os
import shutil
from typing import Any

import torch.compiler.config
from torch import nn

from shared.compat import of_torch
from shared.config.options import Options
from shared.errors import UserError
from shared.processes.collectives import agree

BACKEND = "inductor"
MOST_VARIANTS = 64  # of a layer's code: kinds of layers x training or not x one row or several; torch's default is 8


def compile_layers(accelerator: Any, config: Options, model: nn.Module, fixed_shapes: bool = False) -> nn.Module:
    """`model` with its repeated layers compiled, if --torch_compile asks for that; before `prepare`, on all processes.

    Each layer is compiled by itself, which takes the time of one layer instead of the whole model. It is compiled in
    place, so the names of weights, checkpoints and the exported model stay the same. The results are the same up to
    rounding, and dropout draws other numbers.

    Texts compile with dynamic shapes: a new longest row or number of tokens does not recompile. Images compile with
    `fixed_shapes`, once for each number of rows: the code is faster, and convolutions compile in seconds instead of
    minutes. In both cases a resumed run uses the same code as an uninterrupted one.

    CUDA graphs (torch's mode "reduce-overhead") are left out: with several micro-batches per step their replay
    overwrites the gradients that the first one left (pytorch#169545).

    Raises:
        UserError: there is no compiler, the model has no repeated layers, or it is to be sharded by FSDP.
    """
    if not config.torch_compile:
        return model
    layers = repeated_layers(model)
    agree(accelerator, problem(accelerator, layers, type(model).__name__))
    torch.compiler.config.recompile_limit = MOST_VARIANTS
    for layer in layers:
        layer.compile(dynamic=not fixed_shapes, backend=BACKEND)
    return model


def repeated_layers(model: nn.Module) -> list[nn.Module]:
    """The outermost modules in lists of two or more of one class: an encoder's layers, a ResNet's stages."""
    found: list[nn.Module] = []
    for child in model.children():
        layers = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        if len(layers) > 1 and len({type(layer) for layer in layers}) == 1:
            found += layers
        else:
            found += repeated_layers(child)
    return found


def problem(accelerator: Any, layers: list[nn.Module], name: str) -> UserError | None:
    """Why --torch_compile cannot be had here, if so."""
    variable, usual = ("CXX", "g++") if accelerator.device.type == "cpu" else ("CC", "gcc")
    compiler = os.environ.get(variable, usual)
    if accelerator.is_fsdp2:
        return UserError("--torch_compile was never tried under FSDP: leave it out, or use multi_gpu.yaml")
    if not layers:
        return UserError(f"--torch_compile: {name} has no repeated layers to compile: leave the flag out")
    if shutil.which(compiler.split()[0]) is None:
        return UserError(
            f"--torch_compile needs a compiler, and there is no {compiler}: install it, name another in the "
            f"environment variable {variable}, or leave the flag out"
        )
    return None


def compiled(model: nn.Module) -> bool:
    """Whether some layers of a model are compiled, so that hooks inside of them do not run."""
    return any(of_torch.is_compiled(module) for module in model.modules())
