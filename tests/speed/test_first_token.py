"""A last layer for the first token only gives the same logits and gradients, and is used only where it is valid."""

import copy
from types import SimpleNamespace

import families
import pytest
import runs
import torch
from transformers import DeiTForImageClassificationWithTeacher

from shared.extras.flops import attention_flops, count_flops
from shared.images import image_models
from shared.options.data_options import ModelOptions
from shared.speed.first_token import FAMILIES, shorten_last_layer


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_gradients_equal_those_of_the_whole_layer(kind, padded):
    whole, inputs = families.small(kind), families.batch(kind, padded)
    short = copy.deepcopy(whole)
    shorten_last_layer(short)
    assert (families.is_short(whole), families.is_short(short)) == (False, True)
    assert short.base_model(**inputs).last_hidden_state.shape == (3, 1, 32)
    expected, found = families.logits_and_gradients(whole, inputs), families.logits_and_gradients(short, inputs)
    for one, other in zip(expected, found, strict=True):
        assert runs.distance(other, one) < 1e-5
    assert set(short.state_dict()) == set(whole.state_dict())
    again = families.logits_and_gradients(copy.deepcopy(short), families.batch(kind, not padded))
    assert runs.distance(again[0], found[0]) > 1e-3, "a copy computes its own inputs, and the mask matters"


def test_adapting_an_image_classifier_to_the_device_shortens_its_last_layer():
    config = SimpleNamespace(**vars(ModelOptions()), sync_batchnorm=False, channels_last=True, cudnn_benchmark=False)
    model = image_models.adapt_to_device(families.accelerator(), config, families.small("vit"))
    assert families.is_short(model)


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "vit"])
def test_dropout_is_drawn_for_each_call_and_only_in_training(kind):
    model, inputs = families.small(kind, **dict.fromkeys(families.NO_DROPOUT, 0.5)), families.batch(kind)
    shorten_last_layer(model)
    model.eval().base_model.get_submodule(FAMILIES[kind][0])[-1].train()
    torch.manual_seed(1)
    first, second = model(**inputs).logits, model(**inputs).logits
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(model(**inputs).logits, first)
    model.eval()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)


def test_other_models_are_not_changed():
    for model in (
        families.small("modernbert"),  # its head uses the mean of all tokens
        families.small("albert"),  # its head uses the first token, but its layers are one shared layer
        families.small("bert", is_decoder=True),
        families.small("bert", attn_implementation="eager"),
        families.small("bert", families.MASKED_LM),
        DeiTForImageClassificationWithTeacher(families.config_of("deit")),  # its heads use the first two tokens
        families.OwnHeadForSequenceClassification(families.config_of("bert")),
    ):
        before, inputs = copy.deepcopy(model.eval()), families.batch(model.config.model_type)
        shorten_last_layer(model)
        assert not families.is_short(model)
        assert torch.equal(model(**inputs).logits, before(**inputs).logits)


def test_flops_that_are_not_computed_are_not_counted():
    counted = []
    for shorten in (False, True):
        model = families.small("bert")
        if shorten:
            shorten_last_layer(model)
        counted.append(count_flops(model, lambda model=model: model(**families.batch(padded=False))))
        assert attention_flops(model) == 12 * (3 - shorten) * 32
    of_a_token = 2 * (2 * 32 * 32 + 2 * 32 * 64)  # query, output and the feed-forward network
    assert 60 * (counted[0] - counted[1]) == pytest.approx(3 * 3 * 19 * of_a_token)  # with the backward pass
