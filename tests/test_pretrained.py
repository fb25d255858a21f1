"""Where loaded weights lie, and activation checkpointing; what cannot be loaded is in tests/test_bad_input.py."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, ResNetConfig, ResNetForImageClassification

from shared.errors import UserError
from shared.pretrained import ALIGNMENT, align, checkpoint_activations


def somewhere_else(weights):
    """The same numbers, 4 bytes behind a multiple of 64."""
    place = torch.empty(weights.numel() + 1)[1:].view(weights.shape)
    return place.copy_(weights)


def test_what_a_model_computes_does_not_depend_on_where_its_weights_lie():
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes)).eval()
    logits = model(torch.arange(6)[None]).logits
    for weights in model.parameters():
        weights.data = somewhere_else(weights.data)
    tied = torch.nn.Linear(256, 20, bias=False)
    tied.weight = model.bert.embeddings.word_embeddings.weight
    align(model)
    assert all(weights.data_ptr() % ALIGNMENT == 0 for weights in model.parameters())
    assert tied.weight is model.bert.embeddings.word_embeddings.weight
    assert torch.equal(model(torch.arange(6)[None]).logits, logits)


def test_activations_are_recomputed_without_a_warning_and_the_gradients_stay():
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes))
    ran = []
    model.bert.encoder.layer[0].attention.register_forward_hook(lambda *_: ran.append(1))

    def gradient():
        torch.manual_seed(0)  # of dropout
        model(torch.arange(6)[None]).logits.square().sum().backward()
        found = model.bert.embeddings.word_embeddings.weight.grad.clone()
        model.zero_grad()
        return found

    model.train()
    before = gradient()
    assert len(ran) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint_activations(model)
    assert (gradient() == before).all()
    assert len(ran) == 3  # forward, and once more in the backward pass


def test_an_older_transformers_is_asked_by_its_name():
    called = []
    old = {"gradient_checkpointing_enable": lambda: called.append(1)}
    model = SimpleNamespace(supports_gradient_checkpointing=True, **old)
    checkpoint_activations(model)
    assert called == [1]


def test_a_model_that_cannot_do_it_is_refused():
    model = ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1]))
    with pytest.raises(UserError, match="--gradient_checkpointing: a ResNetForImageClassification cannot do it: leave"):
        checkpoint_activations(model)
