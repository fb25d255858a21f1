"""The settings of how a model computes, in addition to those of `DataOptions`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from shared.config.fields import Limits
from shared.models.trainable import Frozen
from shared.monitoring.hooks import Hook
from shared.options.data_options import DataOptions


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DataOptions):
    """Settings of models of transformers. `adapt_to_device` and `build_model` of a recipe apply them."""

    layer_lr_decay: Annotated[float, Limits(above=0, most=1)] | None = None
    """Factor between the learning rates of a layer and the one above it; the head has the full one. None: all equal."""
    freeze: tuple[str, ...] | None = None
    """Modules or parameters that keep their weights, such as embeddings or 'layers.[0-5]'. None: all are trained."""

    activation_dtype: Literal["bf16"] | None = None
    """Number format of activations, without autocast; weights stay float32. None: given by --mixed_precision."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: saves memory, takes about a third more time."""
    torch_compile: bool = False
    """Compile the repeated layers of the model: faster steps on a GPU, a slower start, different rounding."""

    def hooks(self) -> list[Hook]:
        """As in the base class, after the one that freezes parameters."""
        return [Frozen(), *super().hooks()]
