"""A recipe's Config and its stored form in a run folder, for tests."""

from dataclasses import dataclass
from typing import Any

from shared.config.limits import Share
from shared.config.options import Options


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """A recipe's Config: fields of its own, another default, and a ratio as its default warm-up."""

    NEVER_MATTERS = Options.NEVER_MATTERS | {"tokenizer_processes"}

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
    tokenizer_processes: int | None = None
    """Processes that tokenize."""


def stored(config: Options) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(config).items()}
