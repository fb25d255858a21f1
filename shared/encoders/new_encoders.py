"""The sizes of a new text encoder, from the flags that give them."""

from typing import Any

from shared.errors import UserError
from shared.pretrained.from_pretrained import check_heads
from shared.pretrained.tokenizers import OFFSET_POSITIONS


def sizes_of(config: Any, tokenizer: Any) -> Any:
    """The `PretrainedConfig` of a new encoder of --model_type for `tokenizer`, without dropout.

    Raises:
        UserError: sizes that do not fit each other, or a flag without effect on this type.
    """
    from transformers import AutoConfig

    rotary = config.model_type == "modernbert"
    check_heads(config.hidden_size, config.num_attention_heads, rotary)
    if config.rope_theta is not None and not rotary:
        raise UserError(
            f"--rope_theta {config.rope_theta:g} has no effect on --model_type {config.model_type}, whose positions "
            "are not rotary: leave it out"
        )
    skipped = tokenizer.pad_token_id + 1 if config.model_type in OFFSET_POSITIONS else 0
    own = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if rotary:
        own = {"classifier_pooling": "mean"} | ({"global_rope_theta": theta} if (theta := config.rope_theta) else {})
    return AutoConfig.for_model(
        config.model_type,
        vocab_size=-(-len(tokenizer) // 64) * 64,
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
        **own,
    )
