"""Text encoders on a device: nothing computed that no head reads, the attention that is fast there, --torch_compile."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from shared.compat import of_transformers
from shared.config.options import Options
from shared.encoders.attention import attend
from shared.models.compiling import compile_layers
from shared.models.first_token import shorten_last_layer
from shared.models.loadable import check_names
from shared.models.self_check import keep_if_equal, text_batch

ATTENTION, PRODUCTS = "sdpa_on_device", "sdpa_or_products"


def adapt_to_device(accelerator: Any, config: Options, model: nn.Module) -> nn.Module:
    """The model as its device and --torch_compile ask for it; before optimizer and `prepare`.

    Raises:
        UserError: see `check_names` and `compile_layers`.
    """
    check_names(model)
    shorten_last_layer(model)
    attend_to_all(accelerator, model)
    if accelerator.device.type == "cuda":
        mask_on_device(model)
    elif accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16":
        attend_by_products(model)
    return compile_layers(accelerator, config, model)


def attend_to_all(accelerator: Any, model: Any) -> None:
    """Have a BigBird attend to all tokens, in the exported config too.

    Under its block-sparse attention the first short batch switches it over for all later ones, so that what it computes
    would depend on the order in which a process sees its batches.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "attention_type", None) == "block_sparse":
        model.base_model.set_attention_type("original_full")
        config.attention_type = "original_full"
        accelerator.print(f"{type(model).__name__} attends to all tokens: a batch decides if it is block-sparse")


def attend_by_products(model: Any) -> None:
    """Have an encoder's attention be that of shared/encoders/attention.py; see `use_attention`."""
    if not uses_sdpa(model):
        return
    sdpa_mask = of_transformers.sdpa_mask()
    # Checked in float32, in which the products would not be taken.
    if use_attention(model, "products", partial(products_or_sdpa, products=True), sdpa_mask):
        register_attention(PRODUCTS, products_or_sdpa, sdpa_mask)
        model.set_attn_implementation(PRODUCTS)


def use_attention(model: Any, name: str, attention: Any, mask: Any) -> bool:
    """Have a model use an attention and a mask of ours, unless its logits then change: see `keep_if_equal`."""
    register_attention(name, attention, mask)
    return keep_if_equal(
        model,
        f"the attention {name}",
        lambda: model.set_attn_implementation(name),
        lambda: model.set_attn_implementation("sdpa"),
        text_batch,
    )


def register_attention(name: str, attention: Any, mask: Any) -> None:
    """Give transformers an attention and its mask under a name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def uses_sdpa(model: Any) -> bool:
    """Whether transformers would call torch's scaled-dot-product attention, and lets us replace that."""
    config = getattr(model, "config", None)  # any module will do as a model
    return of_transformers.attention_name(config) == "sdpa" and of_transformers.takes_registered_attention(model)


def products_or_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    products: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [batch, heads, length, width] -> [batch, length, heads, width]."""
    same = key.shape == query.shape or query.shape[2] == 1  # of shared/models/first_token.py
    if getattr(module, "is_causal", True) or not same:  # a decoder, which has more to it
        return of_transformers.attention_function("sdpa")(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(query, key, value, attention_mask, dropout, scale, products)
    return out.transpose(1, 2).contiguous(), None


def mask_on_device(model: Any) -> None:
    """Have scaled-dot-product attention always take a mask where there may be padding.

    transformers looks whether there is any, to leave the mask out where there is none, and for that each forward pass
    makes the host wait until the device is done with what it has.
    """
    if not uses_sdpa(model):
        return
    use_attention(model, ATTENTION, of_transformers.attention_function("sdpa"), always_masked)


def always_masked(**arguments: Any) -> Tensor | None:
    """transformers' mask interface: that of scaled-dot-product attention, left out only where no mask is given."""
    if arguments.get("attention_mask") is not None:
        arguments |= {"allow_is_bidirectional_skip": False, "allow_is_causal_skip": False}
    return of_transformers.sdpa_mask()(**arguments)
