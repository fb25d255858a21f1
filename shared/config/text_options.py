"""The settings that all text recipes share, beside those of `Options`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shared.config.limits import Limits
from shared.config.options import Options


@dataclass(frozen=True, kw_only=True)
class TextOptions(Options):
    """A text encoder, its tokenizer, and the budget of a micro-batch in tokens."""

    # The model
    model_name_or_path: str | None = None
    """Pretrained model on the Hub or in a local folder. None: a new one of the sizes below."""
    model_type: Literal["modernbert", "bert", "roberta"] = "modernbert"
    """Architecture of a new model."""
    hidden_size: int = 128
    """Width of a new model."""
    intermediate_size: int | None = None
    """Width inside a new model's layers. None: twice --hidden_size with gates (modernbert), four times without."""
    num_hidden_layers: int = 2
    """Layers of a new model."""
    num_attention_heads: int = 2
    """Attention heads of a new model."""
    rope_theta: Annotated[float, Limits(above=1)] | None = None
    """Base of the rotary positions in a new ModernBERT's global layers. None: 160,000, which is for 8,192 tokens."""
    tokenizer_type: Literal["wordpiece", "bpe"] = "wordpiece"
    """Tokenizer of a new model, trained on the training text."""
    vocab_size: int = 8192
    """Entries of that tokenizer."""

    # Its input
    max_length: int = 128
    """Longest sequence in tokens."""
    max_tokens_per_micro_batch: int | None = 2048
    """Budget of a micro-batch in tokens, padding included. It decides how a step is cut and what memory it takes."""

    SIZES_OF_NEW_MODELS: ClassVar = frozenset(
        {"model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rope_theta"}
        | {"tokenizer_type", "vocab_size"}
    )
