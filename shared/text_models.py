"""Text encoders on a device: attention masks that the host does not look at, and --torch_compile."""

from typing import Any

from torch import Tensor, nn

from shared.compiling import compile_layers
from shared.options import Options

ATTENTION = "sdpa_on_device"


def for_device(accelerator: Any, config: Options, model: nn.Module) -> nn.Module:
    """The model as its device and --torch_compile ask for it; before optimizer and `prepare`.

    Raises:
        UserError: see `compile_layers`.
    """
    if accelerator.device.type == "cuda":
        mask_on_device(model)
    return compile_layers(accelerator, config, model)


def mask_on_device(model: Any) -> None:
    """Have scaled-dot-product attention always take a mask where there may be padding.

    transformers looks whether there is any, to leave the mask out where there is none, and for that each forward pass
    makes the host wait until the device is done with what it has.
    """
    if model.config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION, always_masked)
    model.set_attn_implementation(ATTENTION)


def always_masked(**arguments: Any) -> Tensor | None:
    """transformers' mask interface: that of scaled-dot-product attention, left out only where no mask is given."""
    from transformers.masking_utils import sdpa_mask

    if arguments.get("attention_mask") is not None:
        arguments |= {"allow_is_bidirectional_skip": False, "allow_is_causal_skip": False}
    return sdpa_mask(**arguments)
