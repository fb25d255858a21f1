"""Private interfaces of transformers: the attention of a model, and the initialization of new weights."""

from collections.abc import Callable, Collection
from typing import Any

import torch

from shared.errors import UserError


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


def draw_anew(model: Any, names: Collection[str]) -> None:
    """`_is_hf_initialized` of tensors and modules: draw these parameters anew, as transformers draws missing ones.

    Raises:
        UserError: this version of transformers draws other parameters, or none.
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
        raise UserError(
            "a new last layer for other labels cannot be drawn with this version of transformers: install the versions "
            "of requirements.txt"
        )
