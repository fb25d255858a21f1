"""A recipe's Config and its stored form in a run folder, for tests."""

from dataclasses import dataclass
from typing import Annotated, Any

from shared.config.fields import Meaning, Share
from shared.options.data_options import DataOptions, MetricOptions


@dataclass(frozen=True, kw_only=True)
class Config(MetricOptions):
    """A recipe's Config: fields of its own, another default, and a ratio as its default warm-up."""

    output_dir: str = "out/nlp"
    """Folder of the run."""
    global_batch_size: int | None = 256
    """Samples per optimizer step."""
    warmup_ratio: float | None = 0.06
    """Share of all optimizer steps."""
    max_length: int = 128
    """Longest sequence, in tokens."""
    max_tokens_per_micro_batch: int | None = 4096
    """Most tokens of one micro-batch."""
    mlm_probability: Share = 0.15
    """Share of the tokens that are masked."""
    text_column_names: tuple[str, ...] = ("text",)
    """Columns that hold the text."""
    tokenizer_processes: Annotated[int | None, Meaning.NOT_IN_RESULT] = None
    """Processes that tokenize."""


def stored(config: DataOptions) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(config).items()}
