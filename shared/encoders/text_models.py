"""Text encoders: new ones, and what flags and device change in one (adapters, attention, dtype, --torch_compile)."""

from typing import Any

from torch import Tensor, nn

from shared.compat import of_transformers
from shared.encoders.adapters import add_adapters
from shared.encoders.attention import attend, use_cpu_dropout
from shared.errors import UserError
from shared.models.linear_layers import use_fast_products
from shared.models.transformers_models import check_loads
from shared.options.data_options import ModelOptions
from shared.pretrained.tokenizers import OFFSET_POSITIONS
from shared.processes.starting import without_tf32
from shared.speed.first_token import shorten_last_layer
from shared.speed.layers import compile_layers, use_activation_dtype
from shared.speed.self_check import keep_if_equal, text_batch

ON_GPU, ON_CPU = "sdpa_on_device", "sdpa_or_products"


def adapt_to_device(accelerator: Any, config: ModelOptions, model: nn.Module) -> nn.Module:
    """Adapt the model to its device and the flags; call it before creating the optimizer and `prepare`.

    Raises:
        UserError: see `check_loads`, `add_adapters`, `use_activation_dtype` and `compile_layers`.
    """
    check_loads(model)
    shorten_last_layer(model)
    attend_to_all(accelerator, model)
    if accelerator.device.type == "cuda":
        use_attention(model, ON_GPU)
        compute_exact_angles(model)
    elif accelerator.device.type == "cpu":
        use_attention(model, ON_CPU)
    add_adapters(config, model)  # zero at first, so a check after this would not see a layer that passes over them
    if accelerator.device.type == "cpu":
        use_cpu_dropout(model)
    use_activation_dtype(config, model)
    use_fast_products(model)
    return compile_layers(config, model)


def attend_to_all(accelerator: Any, model: Any) -> None:
    """Make a BigBird attend to all tokens, also in the exported config.

    With block-sparse attention, the first short batch switches the model to full attention for all later batches, so
    the result would depend on the order of the batches in a process.
    """
    config: Any = getattr(model, "config", None)
    if getattr(config, "attention_type", None) == "block_sparse":
        model.base_model.set_attention_type("original_full")
        config.attention_type = "original_full"
        accelerator.print(
            f"{type(model).__name__} attends to all tokens: block-sparse attention depends on the order of the batches"
        )


def compute_exact_angles(model: nn.Module) -> None:
    """Compute rotary angles without TF32: in transformers 5.17 they are a matrix product."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            module.forward = without_tf32()(module.forward)


def use_attention(model: Any, name: str) -> None:
    """Make a model use our attention and mask functions, unless that changes its logits: see `keep_if_equal`.

    Only models that call torch's scaled-dot-product attention through transformers can use them.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    config = getattr(model, "config", None)  # a model without config is allowed
    if of_transformers.attention_name(config) != "sdpa" or not of_transformers.takes_registered_attention(model):
        return
    on_cpu = name == ON_CPU
    AttentionInterface.register(name, products_or_sdpa if on_cpu else of_transformers.attention_function("sdpa"))
    AttentionMaskInterface.register(name, small_mask if on_cpu else always_masked)
    keep_if_equal(
        model,
        f"the attention {name}",
        lambda: model.set_attn_implementation(name),
        lambda: model.set_attn_implementation("sdpa"),
        text_batch,
    )


def products_or_sdpa(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [batch, heads, length, width] -> [batch, length, heads, width]."""
    same = key.shape == query.shape or query.shape[2] == 1  # one query: see shared/speed/first_token.py
    numbers = attention_mask is not None and attention_mask.is_floating_point()  # added to the scores
    if getattr(module, "is_causal", True) or not same or numbers:  # a decoder: causal or cross attention
        return of_transformers.attention_function("sdpa")(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(query, key, value, attention_mask, dropout, scale)
    return out.transpose(1, 2).contiguous(), None


def always_masked(**arguments: Any) -> Tensor | None:
    """transformers' mask interface: the mask of scaled-dot-product attention; None only without an attention mask.

    By itself, transformers drops the mask of a batch without padding. To check this, the host waits for the device.
    transformers allows `allow_is_bidirectional_skip` where only padding and a window limit attention. In rows shorter
    than the window, the mask is then the attention mask, which takes 2 operators instead of 26 to 34.
    """
    if (mask := mask_of_keys(arguments)) is not None:
        return mask.expand(-1, -1, arguments["q_length"], -1)
    if arguments.get("attention_mask") is not None:
        arguments |= {"allow_is_bidirectional_skip": False, "allow_is_causal_skip": False}
    return of_transformers.sdpa_mask()(**arguments)


def small_mask(**arguments: Any) -> Tensor | None:
    """transformers' mask interface for a CPU: [batch, 1, 1, keys] where only padding limits attention.

    transformers makes [batch, 1, queries, keys] instead, and torch converts all of it to numbers in each layer: 6 % of
    the time of a small encoder. None: nothing is masked.
    """
    if (mask := mask_of_keys(arguments)) is None:
        return of_transformers.sdpa_mask()(**arguments)
    return None if mask.all() else mask


def mask_of_keys(arguments: dict[str, Any]) -> Tensor | None:
    """The attention mask as [batch, 1, 1, keys], from arguments of the mask interface, if only it limits attention."""
    mask, keys = arguments.get("attention_mask"), arguments.get("kv_length")
    window, offset = arguments.get("local_size"), arguments.get("kv_offset", 0)
    only_padding = arguments.get("allow_is_bidirectional_skip") and (window is None or keys < window)
    if mask is None or not only_padding or offset or mask.shape[1:] != (keys,):
        return None
    return mask.view(len(mask), 1, 1, keys)


def new_encoder(auto_class: str, config: Any, tokenizer: Any, vocab_multiple: int = 1, **head: Any) -> nn.Module:
    """A model of --model_type with new weights, for `tokenizer`, without dropout.

    Args:
        auto_class: the auto class of transformers, such as AutoModelForMaskedLM.
        config: the recipe's config, with the sizes.
        vocab_multiple: the number of embedding rows is rounded up to a multiple of this number.
        head: entries of the model's config for its head.

    Raises:
        UserError: the sizes do not fit each other.
    """
    import transformers

    rotary = config.model_type == "modernbert"
    size, heads, twice = config.hidden_size, config.num_attention_heads, "twice " * rotary
    if size % (2 * heads if rotary else heads):  # rotary positions turn pairs of numbers
        raise UserError(f"--hidden_size {size} is not a multiple of {twice}--num_attention_heads {heads}: change one")
    skipped = tokenizer.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
    own = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if rotary:
        own = {"classifier_pooling": "mean"} | ({"global_rope_theta": theta} if (theta := config.rope_theta) else {})
    sizes = transformers.AutoConfig.for_model(
        config.model_type,
        vocab_size=-(-len(tokenizer) // vocab_multiple) * vocab_multiple,
        hidden_size=size,
        intermediate_size=config.intermediate_size or size * (2 if rotary else 4),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        max_position_embeddings=config.max_length + skipped,
        pad_token_id=tokenizer.pad_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        **(own | head),
    )
    return getattr(transformers, auto_class).from_config(sizes)
