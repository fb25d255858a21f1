"""The settings of how a model computes, in addition to those of `DataOptions`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shared.config.fields import Limits, Meaning
from shared.config.options import Rule
from shared.models.trainable import Frozen
from shared.models.transformers_export import Pretrained
from shared.monitoring.hooks import Hook
from shared.options.data_options import DataOptions


@dataclass(frozen=True, kw_only=True)
class ModelOptions(DataOptions):
    """Settings of models of transformers. `adapt_to_device` and `build_model` of a recipe apply them."""

    model_name_or_path: Annotated[str | None, Meaning.MAY_BE_ON_HUB] = None
    """Pretrained model on the Hub or in a local folder. None: a new one with the sizes below."""
    revision: str | None = None
    """Branch, tag or commit of --model_name_or_path on the Hub. None: its main branch."""

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

    LEARNING_RATES: ClassVar[tuple[float, float]] = (5e-5, 5e-5)
    """The default of --learning_rate for new weights, and for pretrained ones."""

    NEEDS: ClassVar = (*DataOptions.NEEDS, ("revision", "model_name_or_path"))
    RULES: ClassVar[tuple[Rule, ...]] = (
        *DataOptions.RULES,
        Rule(
            lambda it: it.precision != "no" and it.config.activation_dtype,
            "--activation_dtype {found} computes without autocast, but mixed_precision is {it.precision}: add "
            "--mixed_precision no, or leave it out",
        ),
    )

    @property
    def pretrained(self) -> str | None:
        """--model_name_or_path."""
        return self.model_name_or_path

    @property
    def activations(self) -> str | None:
        """--activation_dtype."""
        return self.activation_dtype

    def default_learning_rate(self) -> float:
        """That of new or of pretrained weights."""
        return self.LEARNING_RATES[self.pretrained is not None]

    def hooks(self) -> list[Hook]:
        """As in the base class, after those that freeze parameters and choose the export."""
        return [Frozen(), Pretrained(), *super().hooks()]
