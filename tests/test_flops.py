"""The operations of a model are counted as the formula says, and torch's own counter agrees."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForMaskedLM

from shared.flops import masked_lm_flops, peak_flops
from shared.masked_head import predict_only_masked


def model_of(kind):
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    special = {"pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, num_attention_heads=4, **sizes, **special))


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_they_are_those_that_torch_counts(kind):
    model, length, masked = model_of(kind), 40, 12
    model.set_attn_implementation("eager")
    predict_only_masked(model)
    ids = torch.randint(5, 320, (1, length))
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, masked=torch.arange(masked)).logits
        F.cross_entropy(logits, ids[0, :masked]).backward()
    (expected,) = masked_lm_flops(model, np.array([length]), np.array([masked]))
    assert expected == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_local_layers_count_their_window():
    model = model_of("modernbert")
    long, short = masked_lm_flops(model, np.array([2000, 100]), np.array([0, 0]))
    assert model.config.layer_types.count("full_attention") == 1
    window = 2 * model.config.sliding_window + 1
    weights = 6 * sum(p.numel() for n, p in model.model.named_parameters() if "Wo" in n or "W" in n)
    assert long == pytest.approx(2000 * (weights + 12 * 64 * (2000 + 2 * window)))
    assert short == pytest.approx(100 * (weights + 12 * 64 * 300))


def test_the_peak_of_unknown_hardware_is_unknown():
    assert peak_flops(SimpleNamespace(device=torch.device("cpu"), mixed_precision="bf16", num_processes=2)) is None
