"""A last layer for the first token only gives the same logits and gradients, and is used only where it is valid."""

import copy
from types import SimpleNamespace

import pytest
import runs
import torch
from families import logits_and_gradients
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    DeiTForImageClassificationWithTeacher,
)

from shared.encoders.text_models import adapt_to_device
from shared.extras.flops import FlopCounter, attention_flops
from shared.images import image_models
from shared.models.trainable import is_short
from shared.options.data_options import ModelOptions
from shared.pretrained.from_pretrained import checkpoint_activations
from shared.speed import compiling
from shared.speed.first_token import FAMILIES, shorten_last_layer

SIZES = {"hidden_size": 32, "embedding_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
TEXT = {"vocab_size": 50, "pad_token_id": 0}
PICTURE = {"image_size": 16, "patch_size": 4, "architectures": ["DeiTForImageClassification"]}  # deit has two classes
PICTURES = ("deit", "vit")


def config_of(kind, dropout=0.0, **more):
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    if kind == "distilbert":
        rates = dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), dropout)
    given = SIZES | (PICTURE if kind in PICTURES else TEXT) | rates | more
    return AutoConfig.for_model(kind, **given, num_hidden_layers=3, initializer_range=0.2, num_labels=3)


def tiny(kind, **more):
    torch.manual_seed(0)
    model = AutoModelForImageClassification if kind in PICTURES else AutoModelForSequenceClassification
    return model.from_config(config_of(kind, **more)).train()


def batch(padded, kind="bert"):
    if kind in PICTURES:
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(int(padded)))}
    lengths = torch.tensor([[20], [13], [5]] if padded else [[20], [20], [20]])
    return {"input_ids": torch.arange(60).view(3, 20) % 49 + 1, "attention_mask": (torch.arange(20) < lengths).long()}


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_gradients_equal_those_of_the_whole_layer(kind, padded):
    whole, inputs = tiny(kind), batch(padded, kind)
    short = copy.deepcopy(whole)
    shorten_last_layer(short)
    assert (is_short(whole), is_short(short)) == (False, True)
    assert short.base_model(**inputs).last_hidden_state.shape == (3, 1, 32)
    expected, found = logits_and_gradients(whole, inputs), logits_and_gradients(short, inputs)
    for one, other in zip(expected, found, strict=True):
        assert runs.distance(other, one) < 1e-5
    assert set(short.state_dict()) == set(whole.state_dict())
    again = logits_and_gradients(copy.deepcopy(short), batch(not padded, kind))
    assert runs.distance(again[0], found[0]) > 1e-3, "a copy computes its own inputs, and the mask matters"


@pytest.mark.parametrize("kind", ["bert", pytest.param("distilbert", marks=pytest.mark.docs)])
@pytest.mark.parametrize("how", ["recomputed", "by products in bf16", pytest.param("compiled", marks=pytest.mark.docs)])
def test_the_short_layer_works_with_recomputation_bf16_and_compilation(how, kind, monkeypatch):
    model, inputs = tiny(kind), batch(padded=True)
    expected = logits_and_gradients(model, inputs)
    half = "bf16" in how
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, is_fsdp2=False, mixed_precision="bf16" if half else "no"
    )
    if how == "recomputed":
        checkpoint_activations(model)
    monkeypatch.setattr(compiling, "BACKEND", "eager")  # traces like the other backends
    model = adapt_to_device(accelerator, ModelOptions(output_dir="unused"), model)
    if how == "compiled":
        model = compiling.compile_layers(accelerator, ModelOptions(output_dir="unused", torch_compile=True), model)
    assert is_short(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        found = logits_and_gradients(model, inputs)
    for one, other in zip(expected, found, strict=True):
        assert runs.distance(other.float(), one) < (0.05 if half else 1e-5)


def test_adapting_an_image_classifier_to_the_device_shortens_its_last_layer():
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    config = SimpleNamespace(**vars(ModelOptions()), sync_batchnorm=False, channels_last=True, cudnn_benchmark=False)
    model = image_models.adapt_to_device(accelerator, config, tiny("vit"))
    assert is_short(model)
    assert model.base_model(**batch(True, "vit")).last_hidden_state.shape == (3, 1, 32)


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "vit"])
def test_dropout_is_drawn_for_each_call_and_only_in_training(kind):
    model, inputs = tiny(kind, dropout=0.5), batch(True, kind)
    shorten_last_layer(model)
    model.eval().base_model.get_submodule(FAMILIES[kind][0])[-1].train()
    torch.manual_seed(1)
    first, second = model(**inputs).logits, model(**inputs).logits
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(model(**inputs).logits, first)
    model.eval()
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)


class MeanForSequenceClassification(BertForSequenceClassification):
    """A user's own class: BERT with another head."""

    def forward(self, **inputs):
        return SimpleNamespace(logits=self.classifier(self.bert(**inputs).last_hidden_state.mean(1)))


@pytest.mark.parametrize(
    "model",
    [
        lambda: tiny("modernbert"),  # its head uses the mean of all tokens
        lambda: tiny("albert"),  # its head uses the first token, but its layers are one shared layer
        lambda: tiny("bert", is_decoder=True),
        lambda: tiny("bert", attn_implementation="eager"),
        lambda: AutoModelForMaskedLM.from_config(config_of("bert")),
        lambda: DeiTForImageClassificationWithTeacher(config_of("deit")),  # its heads use the first two tokens
        lambda: MeanForSequenceClassification(config_of("bert")),
    ],
    ids=["mean", "layers that are one", "decoder", "eager", "masked LM", "two tokens", "a head of one's own"],
)
def test_other_models_are_not_changed(model):
    model = model().eval()
    before, inputs = copy.deepcopy(model), batch(True, model.config.model_type)
    shorten_last_layer(model)
    assert not is_short(model)
    assert torch.equal(model(**inputs).logits, before(**inputs).logits)


def test_flops_that_are_not_computed_are_not_counted():
    counted = []
    for shorten in (False, True):
        model = tiny("bert")
        if shorten:
            shorten_last_layer(model)
        counter = FlopCounter(model)
        model(**batch(padded=False))
        counted.append(counter.stop())
        assert attention_flops(model) == 12 * (3 - shorten) * 32
    of_a_token = 2 * (2 * 32 * 32 + 2 * 32 * 64)  # query, output and the feed-forward network
    assert counted[0] - counted[1] == 3 * 19 * of_a_token
