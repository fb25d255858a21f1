"""`--torch_compile`: compile the repeated layers of a model in place; layers of one kind share their code."""

import torch.compiler.config
from torch import nn

from shared.compat import of_torch_models
from shared.errors import UserError
from shared.models.trainable import repeated_layers
from shared.options.data_options import ModelOptions

BACKEND = "inductor"
MOST_VARIANTS = 64  # of a layer's code: kinds of layers x training or not x one row or more; torch's default is 8


def compile_layers(config: ModelOptions, model: nn.Module, fixed_shapes: bool = False) -> nn.Module:
    """Compile the repeated layers of `model` if --torch_compile is set. Call it before `prepare`.

    Each layer is compiled by itself, which takes the time of one layer instead of the whole model. It is compiled in
    place, so the names of weights, checkpoints and the exported model stay the same. The results are the same up to
    rounding, and dropout draws other numbers.

    Texts compile with dynamic shapes: a new longest row or number of tokens does not recompile. Images compile with
    `fixed_shapes`, once for each number of rows: the code is faster, and convolutions compile in seconds instead of
    minutes. In both cases a resumed run uses the same code as an uninterrupted one.

    CUDA graphs (torch's mode "reduce-overhead") are not used: with gradient accumulation their replay overwrites the
    gradients of the first micro-batch (pytorch#169545).

    Raises:
        UserError: the model has no repeated layers.
    """
    if not config.torch_compile:
        return model
    if not (layers := repeated_layers(model)):
        raise UserError(f"--torch_compile finds no repeated layers in a {type(model).__name__}: leave it out")
    torch.compiler.config.recompile_limit = MOST_VARIANTS
    of_torch_models.compile_whole_under_ddp()
    for layer in layers:
        layer.compile(dynamic=not fixed_shapes, backend=BACKEND)
    return model
