"""Private interfaces of transformers: the attention of a model, and the initialization of new weights."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from shared.compat import missing


def attention_name(config: Any) -> str | None:
    """`PretrainedConfig._attn_implementation`, such as "sdpa".

    None if that name is missing. Then the attention is not replaced, which changes speed and rounding only.
    """
    return getattr(config, "_attn_implementation", None)


def takes_registered_attention(model: Any) -> bool:
    """`PreTrainedModel._supports_attention_backend`: whether a model calls the attention registered by name.

    False if that name is missing. Then the attention is not replaced, which changes speed and rounding only.
    """
    return bool(getattr(model, "_supports_attention_backend", False))


def attention_function(name: str | None) -> Callable[..., Any]:
    """`modeling_utils.ALL_ATTENTION_FUNCTIONS`: the attention registered as `name`; if missing, AttentionInterface."""
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions
    except ImportError:
        from transformers import AttentionInterface

        functions = AttentionInterface()
    return functions[name]


def sdpa_mask() -> Callable[..., Any]:
    """`masking_utils.sdpa_mask`: the function that makes the mask of "sdpa"; if missing, AttentionMaskInterface."""
    try:
        from transformers.masking_utils import sdpa_mask as function
    except ImportError:
        from transformers import AttentionMaskInterface

        return AttentionMaskInterface()["sdpa"]
    return function


def draw_anew(model: Any, names: Collection[str]) -> None:
    """`_is_hf_initialized` of tensors and modules: draw these parameters anew, as transformers draws missing ones.

    Raises:
        UserError: this version of transformers draws other parameters, or none. The model cannot be used then.
    """
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        tensor._is_hf_initialized = name not in names
    for name in names:
        model.get_submodule(name.rpartition(".")[0])._is_hf_initialized = False
    model.initialize_weights()
    drawn = {name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])}
    if not drawn or not drawn <= set(names):
        raise missing("transformers", "_is_hf_initialized", "a new last layer for other labels")
