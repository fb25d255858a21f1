"""Private interfaces of transformers: the attention of a model."""

from collections.abc import Callable
from typing import Any


def attention_name(config: Any) -> str | None:
    """`PretrainedConfig._attn_implementation`, such as "sdpa"; None for the config of another library."""
    return getattr(config, "_attn_implementation", None)


def takes_registered_attention(model: Any) -> bool:
    """`PreTrainedModel._supports_attention_backend`: whether a model calls the attention registered by name."""
    return bool(getattr(model, "_supports_attention_backend", False))


def attention_function(name: str | None) -> Callable[..., Any]:
    """`modeling_utils.ALL_ATTENTION_FUNCTIONS`: the attention registered as `name`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS[name]


def sdpa_mask() -> Callable[..., Any]:
    """`masking_utils.sdpa_mask`: the function that makes the mask of "sdpa"."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask
