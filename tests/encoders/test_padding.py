"""Models whose output depends on padding are detected and get rows of equal length; other models get short rows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSequenceClassification

from shared.encoders.padding import padding_for
from shared.errors import UserError

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
FUNNEL = {"d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 32, "block_sizes": [1, 1], "num_decoder_layers": 1}


def tiny(auto, kind, **more):
    torch.manual_seed(0)
    sizes = FUNNEL if kind == "funnel" else SIZES | {"max_position_embeddings": 64}
    return auto.from_config(AutoConfig.for_model(kind, vocab_size=50, pad_token_id=0, **sizes, **more))


def padding_of(model, precision="no", length=13, max_length=48):
    row, types = np.arange(5, 5 + length), (np.arange(length) > 8).astype(int)
    tokenizer, config = (
        SimpleNamespace(pad_token_id=0),
        SimpleNamespace(mixed_precision=precision, activation_dtype=None, max_length=max_length),
    )
    return padding_for(model, row, tokenizer, config, types)


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(
    ("auto", "kind", "sees"),
    [
        (AutoModelForSequenceClassification, "bert", False),
        (AutoModelForSequenceClassification, "deberta-v2", False),
        (AutoModelForSequenceClassification, "fnet", True),
        (AutoModelForSequenceClassification, "funnel", False),
        (AutoModelForMaskedLM, "funnel", True),
    ],
)
def test_a_model_that_sees_padding_gets_rows_of_one_length_with_a_message(auto, kind, sees, mode):
    model = tiny(auto, kind).train(mode)
    multiple, message = padding_of(model)
    assert multiple == (48 if sees else 1)
    assert (
        f"because padding changes the output of a {type(model).__name__}: use the model with padding='max_length'"
        in message
    ) == sees
    assert padding_of(model, "bf16")[0] == (48 if sees else 8)
    assert all(module.training == mode for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("length", [1, 2, 60])
def test_the_check_works_with_texts_of_any_length(length):
    assert padding_of(tiny(AutoModelForSequenceClassification, "bert"), length=min(length, 44))[0] == 1
    assert padding_of(tiny(AutoModelForSequenceClassification, "bert"), length=min(length, 8), max_length=8)[0] == 1


def test_a_length_that_a_model_cannot_compute_is_refused_in_one_line():
    landmarks = {"segment_means_seq_len": 16, "num_landmarks": 4}
    model = tiny(AutoModelForSequenceClassification, "nystromformer", **landmarks)
    with pytest.raises(UserError, match=r"^--max_length 48: a Nystromformer\w+ cannot compute rows of that length .*$"):
        padding_of(model)
    model = tiny(AutoModelForSequenceClassification, "nystromformer")  # with the published model's number of landmarks
    assert padding_of(model)[0] == 48
