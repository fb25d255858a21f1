"""The installed transformers has the private interfaces that we use; without one a run is slower, not wrong."""

import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, masking_utils

from shared.compat import of_transformers

TRANSFORMERS = f"transformers {transformers.__version__}"


def bert():
    torch.manual_seed(0)
    return BertForSequenceClassification(
        BertConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=9)
    ).eval()


def test_the_attention_of_a_model_is_identified_by_its_name():
    model = bert()
    name = of_transformers.attention_name(model.config)
    assert name == "sdpa", f"{TRANSFORMERS}: config._attn_implementation is gone; used to replace the attention"
    model.set_attn_implementation("eager")
    assert of_transformers.attention_name(model.config) == "eager"
    assert of_transformers.takes_registered_attention(model), f"{TRANSFORMERS}: _supports_attention_backend is gone"


def test_the_attention_is_found_by_its_name():
    attend = of_transformers.attention_function("sdpa")
    assert attend is transformers.AttentionInterface()["sdpa"], f"{TRANSFORMERS}: models call another attention"


def test_sdpa_mask_returns_a_mask_where_omitting_it_is_forbidden():
    size = {"batch_size": 1, "q_length": 3, "kv_length": 3, "device": "cpu", "dtype": torch.float32}
    size["mask_function"] = masking_utils.bidirectional_mask_function
    ones = torch.ones(1, 3, dtype=torch.bool)
    never = {"allow_is_bidirectional_skip": False, "allow_is_causal_skip": False}
    mask = of_transformers.sdpa_mask()(attention_mask=ones, **size, **never)
    assert mask is not None, f"{TRANSFORMERS}: sdpa_mask omits a mask; used so that the host does not wait"
    assert mask.all()
