"""Adapters (--lora_rank): what is trained, the fast paths of adapted models, and refusals."""

import json

import pytest
import runs
import torch
from families import CLASSIFIER, FAMILIES, MASKED_LM, accelerator, tiny

from shared.encoders.text_models import adapt_to_device, adapted_layers, add_adapters, head_of, merge_adapters
from shared.errors import UserError
from shared.options.text_options import TextOptions


def settings(**changed):
    return TextOptions(**{"model_name_or_path": "base", "lora_rank": 4} | changed)


def model_of(family, auto=CLASSIFIER, **more):
    return tiny(auto, family, vocab_size=50, **{"pad_token_id": 0} | more)


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def batch():
    ids, lengths = torch.arange(60).view(3, 20) % 45 + 4, torch.tensor([[20], [13], [5]])
    ids[:, -1] = 3  # T5 classifies by the end-of-sequence token
    return {"input_ids": ids, "attention_mask": (torch.arange(20) < lengths).long()}


def give_values_to_b(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.lora_B["default"].weight.normal_(0, 0.3, generator=generator)
    return model


@pytest.mark.parametrize(
    ("family", "auto", "layers", "head"),
    [
        ("BERT", CLASSIFIER, 12, ["classifier", "bert.pooler"]),
        ("DistilBERT", CLASSIFIER, 12, ["pre_classifier", "classifier"]),
        ("ALBERT", CLASSIFIER, 6, ["classifier", "albert.pooler"]),
        ("ModernBERT", CLASSIFIER, 8, ["head", "classifier"]),
        ("GPT-2", CLASSIFIER, 8, ["score"]),
        ("BERT", MASKED_LM, 12, []),
        ("ModernBERT", MASKED_LM, 8, []),
    ],
)
def test_all_linear_layers_of_the_encoder_get_an_adapter_and_the_head_of_a_classifier_is_trained(
    family, auto, layers, head
):
    model = model_of(family, auto).eval()
    expected = model(**batch()).logits
    add_adapters(settings(), model)
    assert len(adapted_layers(model)) >= layers
    assert head_of(model) == head
    assert trained(model) == {
        name for name, _ in model.named_parameters() if ".lora_" in name or name.startswith(tuple(head))
    }
    assert torch.equal(model(**batch()).logits, expected), "B is zero"


def test_targets_are_named_by_the_end_of_their_names(capsys):
    model = model_of("BERT")
    add_adapters(settings(lora_targets=("query", "layer.1.*.value")), model)
    ends = [name.removeprefix("bert.encoder.layer.") for name, _ in adapted_layers(model)]
    assert ends == ["0.attention.self.query", "1.attention.self.query", "1.attention.self.value"]
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    where = "adapters of 3 layers and the head (classifier, bert.pooler)"
    assert capsys.readouterr().err == f"--lora_rank 4: {weights:,} of {total:,} weights are trained: {where}\n"


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("BERT", {"lora_targets": ("query", "q_proj")}, r"^--lora_targets q_proj: .* called query, key, value, dense$"),
        ("BERT", {"lora_targets": ("pooler.dense",)}, r"^--lora_targets pooler.dense: no linear layer"),
        ("SqueezeBERT", {}, r"^--lora_rank: the encoder of a SqueezeBert\w+ has no linear layers to adapt"),
        (None, {}, "^--lora_rank 4: a Linear is not a model of transformers: leave it out"),
    ],
)
def test_what_cannot_be_adapted_is_refused(family, changed, message):
    with pytest.raises(UserError, match=message):
        add_adapters(settings(**changed), model_of(family) if family else torch.nn.Linear(2, 2))


def test_a_depends_on_the_seed_alone_and_the_random_state_is_unchanged():
    def drawn(seed, state):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        model = model_of("BERT")
        torch.set_rng_state(before)
        add_adapters(settings(seed=seed), model)
        assert torch.equal(torch.get_rng_state(), before)
        return torch.cat([layer.lora_A["default"].weight.flatten() for _, layer in adapted_layers(model)])

    assert torch.equal(drawn(1, 2), drawn(1, 3))
    assert not torch.equal(drawn(1, 2), drawn(2, 2))


def test_adapters_compute_in_the_dtype_of_the_activations():
    model = model_of("ModernBERT")
    adapt_to_device(accelerator(), settings(), model)
    exact = give_values_to_b(model)(**batch()).logits.detach()
    model = model_of("ModernBERT")
    adapt_to_device(accelerator(), settings(activation_dtype="bf16"), model)
    dtypes = set()
    for _, layer in adapted_layers(give_values_to_b(model)):
        layer.lora_B["default"].register_forward_hook(lambda _, __, output: dtypes.add(output.dtype))
    logits = model(**batch()).logits
    assert dtypes == {torch.bfloat16}
    assert logits.dtype == torch.float32
    assert runs.distance(logits, exact) < 0.1
    logits.sum().backward()
    assert {p.grad.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ("BERT", "GPT-2", "ALBERT") else pytest.mark.docs)
        for family in FAMILIES
        if family != "SqueezeBERT"  # refused, see above
    ],
)
def test_merging_gives_a_model_of_transformers_with_the_same_logits(family, tmp_path):
    model = model_of(family).eval()
    names, before = list(model.state_dict()), model(**batch()).logits
    add_adapters(settings(lora_alpha=3), model)
    adapted = give_values_to_b(model)(**batch()).logits
    assert runs.distance(adapted, before) > 1e-3
    merge_adapters(model)(tmp_path)
    assert list(model.state_dict()) == names
    assert runs.distance(model(**batch()).logits, adapted) < 1e-4, "no layer of the model passes over its adapter"
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_alpha"] == 3
    assert not hasattr(model, "merge_adapters")
