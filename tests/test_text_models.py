"""The mask that a GPU gets: what transformers computes with its own, and no look at the batch."""

import sys

import pytest
import runs
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

sys.path.insert(0, str(runs.ROOT))

from benchmarks.host_waits import Operations
from shared.text_models import mask_on_device


def tiny(kind):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    local = {"local_attention": 8, "global_attn_every_n_layers": 2} if kind == "modernbert" else {}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **sizes, **local, vocab_size=50, pad_token_id=0, initializer_range=0.2)
    return AutoModelForSequenceClassification.from_config(config).eval()


def batch(padded):
    lengths = torch.tensor([[20], [13], [5]] if padded else [[20], [20], [20]])
    return {"input_ids": torch.arange(60).view(3, 20) % 49 + 1, "attention_mask": (torch.arange(20) < lengths).long()}


def logits_and_waits(model, inputs):
    found = []
    with torch.no_grad(), Operations(found.append):
        return model(**inputs).logits, found


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_the_mask_is_always_taken_and_gives_the_same(kind, padded):
    model, inputs = tiny(kind), batch(padded)
    expected, waits = logits_and_waits(model, inputs)
    assert waits, "transformers looks at the batch by itself: else this module has nothing to do"
    mask_on_device(model)
    given, waits = logits_and_waits(model, inputs)
    assert not waits
    assert (given - expected).abs().max() < 1e-5
    assert (logits_and_waits(model, batch(not padded))[0] - given).abs().max() > 1e-3, "the mask is seen"


def test_a_model_with_another_attention_keeps_it():
    model = tiny("bert")
    model.set_attn_implementation("eager")
    mask_on_device(model)
    assert model.config._attn_implementation == "eager"
