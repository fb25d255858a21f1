"""The settings of how a model computes, in addition to those of `DataOptions`."""

from dataclasses import dataclass
from typing import Literal

from shared.options.data_options import DataOptions


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DataOptions):
    """Settings of models of transformers. `adapt_to_device` and `build_model` of a recipe apply them."""

    activation_dtype: Literal["bf16"] | None = None
    """Number format of activations, without autocast; weights stay float32. None: given by --mixed_precision."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: saves memory, takes about a third more time."""
    torch_compile: bool = False
    """Compile the repeated layers of the model: faster steps on a GPU, a slower start, different rounding."""
