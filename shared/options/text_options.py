"""The settings that all text recipes share, in addition to those of `ModelOptions`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

import torch

from shared.config.fields import Limits, Meaning
from shared.options.data_options import MetricOptions, ModelOptions

TOKENS = "max_tokens_per_micro_batch"  # the field


@dataclass(frozen=True, kw_only=True)
class TextOptions(ModelOptions):
    """Settings of the text encoder, its tokenizer and its input."""

    model_type: Annotated[Literal["modernbert", "bert", "roberta"], Meaning.SIZE_OF_NEW_MODEL] = "modernbert"
    """Architecture of a new model."""
    hidden_size: Annotated[int, Meaning.SIZE_OF_NEW_MODEL] = 128
    """Width of a new model."""
    intermediate_size: Annotated[int | None, Meaning.SIZE_OF_NEW_MODEL] = None
    """Width of a new model's MLPs. None: twice --hidden_size for modernbert, whose MLPs are gated, else four times."""
    num_hidden_layers: Annotated[int, Meaning.SIZE_OF_NEW_MODEL] = 2
    """Number of layers of a new model."""
    num_attention_heads: Annotated[int, Meaning.SIZE_OF_NEW_MODEL] = 2
    """Number of attention heads of a new model."""
    rope_theta: Annotated[float | None, Limits(above=1), Meaning.SIZE_OF_NEW_MODEL] = None
    """Base of the rotary positions in a new ModernBERT's global layers. None: 160,000, which suits 8,192 tokens."""
    tokenizer_type: Annotated[Literal["wordpiece", "bpe"], Meaning.SIZE_OF_NEW_MODEL] = "wordpiece"
    """Tokenizer of a new model, trained on the training data."""
    vocab_size: Annotated[int, Meaning.SIZE_OF_NEW_MODEL] = 8192
    """Vocabulary size of the tokenizer of a new model."""

    max_length: int = 128
    """Maximum length of a sequence in tokens."""
    max_tokens_per_micro_batch: int | None = None
    """Maximum number of tokens in a micro-batch, with its padding. It determines the memory that a step needs. None:
    16,384 if the run begins on a GPU; on a CPU 2,048, for nlp 1,024."""

    warmup_ratio: float | None = 0.06
    """Warm-up as a fraction of all optimizer steps, from 0 to 1, instead of --warmup_steps."""
    lora_rank: int | None = None
    """Train adapters of this rank (LoRA) in a pretrained encoder, and the head of a classifier. None: all weights."""
    lora_alpha: int | None = None
    """The output of an adapter is multiplied by this number, divided by --lora_rank. None: twice --lora_rank."""
    lora_dropout: Annotated[float, Limits(least=0, below=1)] | None = None
    """Share of an adapter's inputs that dropout sets to zero in training. None: 0."""
    lora_targets: tuple[str, ...] | None = None
    """Linear layers of the encoder that get an adapter, by the end of their name: query value. None: all of them."""

    MAX_TOKENS: ClassVar = (2048, 16_384)
    """--max_tokens_per_micro_batch None on a CPU and on a GPU, which small passes do not keep busy."""

    NEEDS: ClassVar = (
        *ModelOptions.NEEDS,
        ("rope_theta", "model_type", "modernbert"),
        ("lora_rank", "model_name_or_path"),
        ("lora_alpha", "lora_rank"),
        ("lora_dropout", "lora_rank"),
        ("lora_targets", "lora_rank"),
    )
    EXCLUDES: ClassVar = (*ModelOptions.EXCLUDES, ("freeze", "lora_rank"))

    @property
    def max_tokens(self) -> int | None:
        return self.max_tokens_per_micro_batch or self.MAX_TOKENS[torch.accelerator.is_available()]

    def settled(self, accelerator: Any, stored: Mapping[str, Any] | None) -> Self:
        """As in the base class, with the budget of tokens, which is that of the first launch on any device."""
        tokens = self.max_tokens_per_micro_batch
        if tokens is None:
            tokens = stored.get(TOKENS) if stored else self.MAX_TOKENS[accelerator.device.type != "cpu"]
        return replace(super().settled(accelerator, stored), max_tokens_per_micro_batch=tokens)

    def default_learning_rate(self) -> float:
        """As in the base class; that of adapters is ten times that of pretrained weights."""
        return super().default_learning_rate() * (1 if self.lora_rank is None else 10)


@dataclass(frozen=True, kw_only=True)
class TextLossOptions(TextOptions, MetricOptions):
    """Settings of the training loss of a text classifier, and of its metrics."""

    class_weights: tuple[str, ...] | None = None
    """Class weights of the training loss: balanced, or numbers in the order of the model's labels. None: all equal."""
    label_smoothing: Annotated[float, Limits(least=0, below=1)] = 0.0
    """Share of each target that is spread evenly over all classes. The evaluation loss does not use it."""

    NEEDS: ClassVar = tuple(dict.fromkeys((*TextOptions.NEEDS, *MetricOptions.NEEDS)))
