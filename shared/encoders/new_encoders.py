"""Creating a new text encoder from the flags for its sizes."""

from typing import Any

from torch import nn

from shared.errors import UserError
from shared.pretrained.tokenizers import OFFSET_POSITIONS


def new_encoder(auto_class: str, config: Any, tokenizer: Any, vocab_multiple: int = 1, **head: Any) -> nn.Module:
    """A model of --model_type with new weights, for `tokenizer`, without dropout.

    Args:
        auto_class: the auto class of transformers, such as AutoModelForMaskedLM.
        config: the recipe's config, with the sizes.
        vocab_multiple: the number of embedding rows is rounded up to a multiple of this number.
        head: entries of the model's config for its head.

    Raises:
        UserError: the sizes do not fit each other, or a flag has no effect on this type.
    """
    import transformers

    rotary = config.model_type == "modernbert"
    if config.hidden_size % (config.num_attention_heads * (2 if rotary else 1)):
        multiple = "twice --num_attention_heads" if rotary else "--num_attention_heads"
        raise UserError(
            f"--hidden_size {config.hidden_size} is not a multiple of {multiple} {config.num_attention_heads}"
            f"{', as rotary positions require' * rotary}: change one of them"
        )
    if config.rope_theta is not None and not rotary:
        raise UserError(
            f"--rope_theta {config.rope_theta:g} has no effect on --model_type {config.model_type}, whose positions "
            "are not rotary: remove it"
        )
    skipped = tokenizer.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
    own = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if rotary:
        own = {"classifier_pooling": "mean"} | ({"global_rope_theta": theta} if (theta := config.rope_theta) else {})
    sizes = transformers.AutoConfig.for_model(
        config.model_type,
        vocab_size=-(-len(tokenizer) // vocab_multiple) * vocab_multiple,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size or config.hidden_size * (2 if rotary else 4),
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        max_position_embeddings=config.max_length + skipped,
        pad_token_id=tokenizer.pad_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        **(own | head),
    )
    return getattr(transformers, auto_class).from_config(sizes)
