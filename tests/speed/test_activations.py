"""--activation_dtype bf16: which tensors are bf16, which stay float32, and what the results are."""

import copy
from types import SimpleNamespace

import families
import pytest
import runs
import torch
from families import CLASSIFIER, MASKED_LM
from torch import nn

from shared.models.trainable import called_layers
from shared.models.transformers_models import Pretrained
from shared.options.data_options import ModelOptions
from shared.speed.layers import in_float32, use_activation_dtype

BF16, CONFIG = torch.bfloat16, ModelOptions(activation_dtype="bf16", output_dir="unused")
TEXTS = ("bert", "roberta", "electra", "distilbert", "modernbert")
CASES = [(kind, head) for kind in TEXTS for head in (CLASSIFIER, MASKED_LM)] + [("vit", None), ("deit", None)]


def tiny(kind, head=None):
    return families.small(kind, head, initializer_range=0.1).eval()


def in_bf16(model):
    model = copy.deepcopy(model)
    use_activation_dtype(CONFIG, model)
    return model


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_layers_give_bf16_and_the_rest_is_float32_and_all_of_it_in_a_check(kind, head):
    model, inputs = tiny(kind, head), families.batch(kind)
    half = in_bf16(model)
    found = {}
    for name, module in half.named_modules():
        if isinstance(module, nn.LayerNorm | nn.Linear) or module in called_layers(half):
            module.register_forward_hook(lambda _, __, output, name=name: found.update({name: output.dtype}))
    logits, gradients = families.logits_and_gradients(half, inputs)
    inside = [name for name in found if ".embeddings." not in name]
    assert {found[name] for name in inside} == {BF16}
    assert len(inside) > 12
    assert {logits.dtype, *(p.dtype for p in half.parameters())} == {torch.float32}
    assert gradients.dtype == torch.float32
    expected, of_float32 = families.logits_and_gradients(model, inputs)
    assert 1e-5 < runs.distance(logits, expected) < 0.03, "bf16 has 8 bits"
    assert gradients.shape == of_float32.shape
    assert runs.distance(gradients, of_float32) < 0.05
    before = model.state_dict()
    assert set(half.state_dict()) == set(before)
    with in_float32(half):  # as in the checks of equality at the start
        again = families.logits_and_gradients(half, inputs)
    assert all(map(torch.equal, again, (expected, of_float32)))
    assert all(torch.equal(tensor, before[name]) for name, tensor in half.state_dict().items())
    assert torch.equal(half(**inputs).logits, logits), "in bf16 again"


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_layer_computes_what_a_copy_with_bf16_weights_computes(kind):
    """The oracle: torch's own arithmetic in bf16, to the bit, forward and backward."""
    model = in_bf16(tiny(kind, MASKED_LM))
    layer = called_layers(model)[1]
    copied = copy.deepcopy(layer).bfloat16()
    hidden = torch.randn(2, 9, 32).to(BF16)
    more = {}
    if kind == "modernbert":  # cosine and sine of rotary positions stay float32
        positions = torch.arange(9)[None]
        more["position_embeddings"] = model.model.rotary_emb(hidden, positions, layer.attention_type)
        assert {each.dtype for each in more["position_embeddings"]} == {torch.float32}
    outputs = [each(hidden, **more) for each in (layer, copied)]
    assert torch.equal(*outputs)
    for each, output in zip((layer, copied), outputs, strict=True):
        output.float().square().sum().backward()
        assert output.dtype == BF16, type(each)
    for (name, ours), theirs in zip(layer.named_parameters(), copied.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad.float()), name


def test_other_models_are_refused():
    own = families.OwnHeadForSequenceClassification(families.config_of("bert"))
    for model in (families.small("albert"), nn.Linear(2, 2), own):
        message = runs.refusal(use_activation_dtype, CONFIG, model)
        assert message.startswith(f"--activation_dtype bf16 does not suit a {type(model).__name__}: ")


def test_the_launch_card_names_it():
    for dtype, shown in (("bf16", {"precision": "bf16 activations without autocast, weights fp32"}), (None, {})):
        Pretrained().loaded(run := SimpleNamespace(config=ModelOptions(activation_dtype=dtype), card={}))
        assert run.card == shown
