"""A replacement in a model that changes the model's outputs is undone, and one line is printed."""

import copy
from functools import partial

import pytest
import torch
from families import MASKED_LM, batch, is_short, small
from transformers.integrations import sdpa_attention

from shared.compat import of_transformers
from shared.encoders import attention, masked_head
from shared.encoders.attention import ON_CPU, ON_GPU, use_attention
from shared.encoders.masked_head import predict_only_masked
from shared.speed import first_token
from shared.speed.first_token import shorten_last_layer
from shared.speed.self_check import image_batch, keep_if_equal

HEADS = {"mlm": ("bert", MASKED_LM)}


def tiny(kind):
    return small(*HEADS.get(kind, (kind,)))


def masked_only(model):
    predict_only_masked(model, packing=True)


def logits(model, kind):
    with torch.no_grad():
        return copy.deepcopy(model).eval()(**batch(kind)).logits


def changed(function):
    """`function` as in a version of transformers that gives slightly different results.

    The difference is not a change of scale, because a norm would remove it.
    """

    def wrong(*args, **arguments):
        out = function(*args, **arguments)
        states = out if isinstance(out, torch.Tensor) else out[0]
        states = states + 0.01 * states.roll(1, -1)
        return states if isinstance(out, torch.Tensor) else (states, *out[1:])

    return wrong


def gone(*args, **arguments):
    raise AttributeError("'BertLayer' has no 'attention'")


def unpadded(**arguments):
    """An attention mask that masks nothing."""


def family(kind, change, families=first_token.FAMILIES):
    layers, forward = families[kind]
    return (families, kind, (layers, change(forward)))


def other_places(function):
    """`function` for masked tokens in another order."""

    def wrong(*args, documents, **arguments):
        masked = documents.masked._replace(places=documents.masked.places.flip(0))
        return function(*args, documents=documents._replace(masked=masked), **arguments)

    return wrong


DIFFERS, FAILS = "it changes the outputs or gradients by more than rounding", "it cannot be checked (AttributeError: "
LAST, MASKED = (f"a last layer that computes {tokens} only" for tokens in ("the first token", "masked tokens"))
OF_GPU, OF_CPU = (f"the attention {name}" for name in (ON_GPU, ON_CPU))
attend_on_gpu, attend_on_cpu = (partial(use_attention, name=name) for name in (ON_GPU, ON_CPU))
ATTENTION = lambda _: changed(sdpa_attention.sdpa_attention_forward)  # noqa: E731
CASES = {
    "last layer, bert": ("bert", shorten_last_layer, family("bert", changed), LAST, DIFFERS),
    "last layer, distilbert": ("distilbert", shorten_last_layer, family("distilbert", changed), LAST, DIFFERS),
    "last layer, vit": ("vit", shorten_last_layer, family("vit", changed), LAST, DIFFERS),
    "last layer, no gradient": ("bert", shorten_last_layer, family("bert", torch.no_grad()), LAST, DIFFERS),
    "last layer, fails": ("bert", shorten_last_layer, family("bert", lambda _: gone), LAST, FAILS),
    "last layer, mlm": ("mlm", masked_only, family("bert", other_places, masked_head.FAMILIES), MASKED, DIFFERS),
    "masks": ("bert", attend_on_gpu, (attention, "always_masked", unpadded), OF_GPU, DIFFERS),
    "small masks": ("bert", attend_on_cpu, (attention, "small_mask", unpadded), OF_CPU, DIFFERS),
    "masks, attention": ("bert", attend_on_gpu, (of_transformers, "attention_function", ATTENTION), OF_GPU, DIFFERS),
    "products": ("bert", attend_on_cpu, (attention, "attend", changed(attention.attend)), OF_CPU, DIFFERS),
    "products, fails": ("modernbert", attend_on_cpu, (attention, "attend", gone), OF_CPU, FAILS),
}


@pytest.mark.parametrize("case", CASES)
def test_a_replacement_that_gives_different_results_is_undone_and_named(case, monkeypatch, capsys):
    kind, technique, (owner, name, wrong), replacement, why = CASES[case]
    (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, name, wrong)
    model = tiny(kind)
    expected = logits(model, kind)
    technique(model)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"warning: a {type(model).__name__} is trained with the code of transformers ")
    assert f", without {replacement}: {why}" in lines[0]
    assert torch.equal(logits(model, kind), expected)
    assert not is_short(model)
    assert not [module for module in model.base_model.modules() if "forward" in vars(module)]
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("why", [DIFFERS, FAILS])
def test_a_sparse_head_with_different_logits_is_replaced_by_the_dense_head(why, monkeypatch, capsys):
    model = tiny("mlm").eval()
    index_select = torch.Tensor.index_select

    def wrong(states, dim, places):
        if states.shape[-1] != model.config.hidden_size:
            return index_select(states, dim, places)
        return index_select(states, dim, places) * 1.01 if why == DIFFERS else gone()

    masked = torch.tensor([3, 9, 30])
    expected = logits(model, "mlm").flatten(0, 1)[masked]
    monkeypatch.setattr(torch.Tensor, "index_select", wrong)
    predict_only_masked(model, packing=False)
    assert f"without a head on masked tokens only: {why}" in capsys.readouterr().err
    with torch.no_grad():
        assert torch.equal(model(**batch("mlm"), masked=masked).logits, expected)


@pytest.mark.parametrize(
    ("kind", "technique"),
    [
        *((kind, shorten_last_layer) for kind in ("bert", "roberta", "distilbert", "vit")),
        *((kind, technique) for kind in ("bert", "modernbert") for technique in (attend_on_gpu, attend_on_cpu)),
        ("mlm", masked_only),
    ],
)
def test_a_check_that_passes_changes_nothing_and_prints_nothing(kind, technique, monkeypatch, capsys):
    model = tiny(kind)
    list(model.modules())[3].eval()
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    technique(model)
    assert capsys.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    if technique is shorten_last_layer:
        assert is_short(model)
    elif technique is not masked_only:
        assert model.config._attn_implementation != "sdpa"


def test_only_the_main_process_prints(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setitem(*family("bert", changed))
    shorten_last_layer(tiny("bert"))
    assert capsys.readouterr() == ("", "")


def test_a_frozen_model_is_checked_by_its_logits(capsys):
    model = tiny("vit").requires_grad_(False)
    assert keep_if_equal(model, "nothing", lambda: None, lambda: None, image_batch)
    change = lambda: model.classifier.bias.data.add_(1.0)  # noqa: E731
    assert not keep_if_equal(model, "its bias", change, lambda: model.classifier.bias.data.sub_(1.0), image_batch)
    assert "without its bias" in capsys.readouterr().err
