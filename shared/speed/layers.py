"""Layers that compute faster: `--activation_dtype bf16` and `--torch_compile`.

With `--activation_dtype bf16`, activations are in bf16 from the embeddings to the logits, weights in float32, and there
is no autocast. Under autocast norms return float32. The residual stream between the layers is then float32 as well, and
elementwise operations read and write four bytes per number. With this flag they read and write two.

A linear layer or norm casts its weights to the dtype of its input, as nanochat's linear layers do. Norms and softmax
compute in float32 inside and return bf16, as the norms of MosaicBERT (Portes et al., 2023, arXiv:2312.17482).
Embeddings are summed in float32, rotary positions are computed in float32, and the loss gets float32 logits. Gradients,
optimizer, checkpoints and the exported model are float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch.nn import functional as F

from shared.compat import of_torch_models
from shared.errors import UserError
from shared.models.trainable import called_layers
from shared.options.data_options import ModelOptions

FAMILIES = ("bert", "camembert", "deit", "distilbert", "electra", "modernbert", "roberta", "vit", "xlm-roberta")
DTYPE = "activation_dtype"  # attribute of the embeddings; None while a model computes in float32
BACKEND = "inductor"
MOST_VARIANTS = 64  # of a layer's code: kinds of layers x training or not x one row or more; torch's default is 8


class FollowingLinear(nn.Linear):
    """A linear layer that computes in the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, *cast(self, input.dtype))


class FollowingLayerNorm(nn.LayerNorm):
    """A layer norm that returns the dtype of its input and computes in float32 inside, as torch's kernels do."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = cast(self, input.dtype)
        return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def cast(layer: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """The weight and bias of a layer in this dtype."""
    return layer.weight.to(dtype), None if layer.bias is None else layer.bias.to(dtype)


FOLLOWING: dict[type, type] = {nn.Linear: FollowingLinear, nn.LayerNorm: FollowingLayerNorm}


def use_activation_dtype(config: ModelOptions, model: Any) -> None:
    """Apply --activation_dtype to a model, in place. Names of weights stay the same.

    Raises:
        UserError: the model is not of one of FAMILIES, as transformers makes it.
    """
    if config.activation_dtype is None:
        return
    known = type(model).__module__.startswith("transformers.models.")  # a head of one's own may not follow
    family = getattr(getattr(model, "config", None), "model_type", None)
    if not known or family not in FAMILIES:
        raise UserError(
            f"--activation_dtype {config.activation_dtype} does not suit a {type(model).__name__}: it is for models "
            f"of transformers of the types {', '.join(FAMILIES)}; leave it out, or use --mixed_precision bf16"
        )
    for module in model.modules():
        if type(module) in FOLLOWING:
            module.__class__ = FOLLOWING[type(module)]
        elif type(module).__name__.endswith("RotaryEmbedding"):
            module.register_forward_pre_hook(in_float32_whatever_the_input)
    setattr(model.base_model.embeddings, DTYPE, torch.bfloat16)
    model.base_model.embeddings.register_forward_hook(begin_activations)
    model.register_forward_hook(end_activations)


def in_float32_whatever_the_input(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Hook of rotary embeddings: their first argument only tells them the device and the dtype of their result."""
    return args[0].new_empty(0, dtype=torch.float32), *args[1:]


def begin_activations(embeddings: nn.Module, _: tuple[Any, ...], output: Tensor) -> Tensor:
    """Hook of the embeddings: the activations begin with their sum."""
    return output.to(getattr(embeddings, DTYPE) or output.dtype)


def end_activations(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
    """Hook of the whole model: the loss gets float32 logits."""
    if (logits := output.get("logits")) is not None:
        output["logits"] = logits.float()


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute in float32 in this context, as checks of equality need it; without effect on other models."""
    half = [module for module in model.modules() if getattr(module, DTYPE, None) is not None]
    try:
        for module in half:
            setattr(module, DTYPE, None)
        yield
    finally:
        for module in half:
            setattr(module, DTYPE, torch.bfloat16)


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
    if not (layers := called_layers(model)):
        raise UserError(f"--torch_compile finds no repeated layers in a {type(model).__name__}: leave it out")
    torch.compiler.config.recompile_limit = MOST_VARIANTS
    of_torch_models.compile_whole_under_ddp()
    for layer in layers:
        layer.compile(dynamic=not fixed_shapes, backend=BACKEND)
    return model
