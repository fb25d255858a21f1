"""Our attention and our masks on the device give the results of those of transformers, and dropout those of torch."""

from types import SimpleNamespace

import pytest
import runs
import torch
from families import CLASSIFIER, batch, small
from families import tiny as tiny_family
from torch import nn
from transformers.masking_utils import (
    bidirectional_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
)

from benchmarks.harness.host_waits import Operations
from shared.encoders import attention, text_models
from shared.encoders.attention import LONGEST, ON_CPU, ON_GPU, CpuDropout, attend, drop_out, use_attention
from shared.options.data_options import ModelOptions


def tiny(kind):
    return small(kind, local_attention=8, global_attn_every_n_layers=2).eval()


def logits_and_waits(model, inputs):
    found = []
    with torch.no_grad(), Operations(found.append):
        return model(**inputs).logits, found


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_our_masks_and_products_give_the_logits_of_transformers(kind, padded, monkeypatch):
    model, inputs, calls = tiny(kind), batch(padded=padded), []
    monkeypatch.setattr(attention, "attend", lambda *given: calls.append(given) or attend(*given))
    expected, waits = logits_and_waits(model, inputs)
    assert waits, "transformers reads the batch on the host; otherwise our mask is not needed"
    for name in (ON_GPU, ON_CPU):
        model.set_attn_implementation("sdpa")
        use_attention(model, name)
        assert model.config._attn_implementation == name
        calls.clear()  # without those of the check on a tiny batch
        given, waits = logits_and_waits(model, inputs)
        assert (given - expected).abs().max() <= 1e-5
        assert name != ON_GPU or not waits
        assert len(calls) == (model.config.num_hidden_layers if name == ON_CPU else 0)
        others, _ = logits_and_waits(model, batch(padded=not padded))
        assert (others - given).abs().max() > 1e-3, "the mask changes the logits"
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(**inputs).logits.float() - expected).abs().max() < 0.05


@pytest.mark.parametrize(("device", "precision"), [("cuda", "bf16"), ("cpu", "bf16"), ("cpu", "no")])
def test_a_module_that_is_not_from_transformers_is_not_changed(device, precision):
    model = torch.nn.Linear(2, 2)
    accelerator = SimpleNamespace(device=torch.device(device), mixed_precision=precision)
    assert text_models.adapt_to_device(accelerator, ModelOptions(output_dir="unused"), model) is model


def test_a_decoder_and_a_model_with_another_attention_keep_it():
    model = tiny("bert")
    model.set_attn_implementation("eager")
    use_attention(model, ON_GPU)
    assert model.config._attn_implementation == "eager"
    decoder, inputs = tiny_family(CLASSIFIER, "GPT-2", 50, pad_token_id=0).eval(), batch()
    expected = decoder(**inputs).logits
    use_attention(decoder, ON_CPU)
    assert torch.equal(decoder(**inputs).logits, expected)


@pytest.mark.parametrize("longest", [12, LONGEST + 8])
@pytest.mark.parametrize("kind", ["none", "padding", "window"])
def test_attention_by_products_equals_a_float64_reference(kind, longest):
    random = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, longest, 16, generator=random) for _ in range(3)]
    seen = (torch.arange(longest) < torch.tensor([[longest], [5]]))[:, None, None]
    place = torch.arange(longest)
    near = seen & ((place[:, None] - place).abs() < 3)  # beyond the window of its last token, a row sees nothing
    mask = {"none": None, "padding": seen, "window": near}[kind]
    rows = slice(None) if kind != "window" else near.any(-1).expand(2, 2, longest)
    found = []
    for dtype, function in ((torch.bfloat16, attend), (torch.float32, attend), (torch.float64, reference)):
        query, key, value = (part.clone().to(dtype).requires_grad_() for part in inputs)
        out = function(query, key, value, mask, 0.0, 0.3)
        assert torch.isfinite(out).all()
        out[rows].square().sum().backward()
        found.append([out[rows].double(), *(part.grad.double() for part in (query, key, value))])
    for half, full, expected in zip(*found, strict=True):
        assert runs.distance(full, expected) < 1e-5
        assert runs.distance(half, expected) < 0.02


def reference(query, key, value, mask, dropout, scale):
    scores = query @ key.transpose(-1, -2) * scale
    return (scores if mask is None else scores.masked_fill(~mask, -1e30)).softmax(-1) @ value


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize(("window", "cheap"), [(8, False), (20, False), (21, True), (None, True)])
def test_a_mask_of_padding_only_is_the_attention_mask_and_others_are_made_by_transformers(padded, window, cheap):
    mask = batch(padded=padded)["attention_mask"].bool()
    function = bidirectional_mask_function if window is None else sliding_window_bidirectional_mask_function(window)
    arguments = {"batch_size": 3, "q_length": 20, "kv_length": 20, "mask_function": function, "local_size": window}
    arguments |= {"attention_mask": mask, "allow_is_causal_skip": False}
    expected = sdpa_mask(**arguments)
    given = attention.always_masked(**arguments, allow_is_bidirectional_skip=True)
    assert torch.equal(given, expected)
    assert (given.data_ptr() == mask.data_ptr()) == cheap
    small = attention.small_mask(**arguments, allow_is_bidirectional_skip=True)
    assert (small is None) == (cheap and not padded)
    assert small is None or torch.equal(small, mask[:, None, None] if cheap else expected)
    for function in (attention.always_masked, attention.small_mask):
        unlike_any = function(**arguments)  # transformers does not say that only padding matters
        assert torch.equal(unlike_any, expected)
        assert unlike_any.data_ptr() != mask.data_ptr()


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.937])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_share_of_zeros_and_the_mean_are_those_of_dropout(probability, dtype):
    torch.manual_seed(0)
    found = drop_out(torch.ones(1001, 999, dtype=dtype), probability)
    assert (found.dtype, found.shape) == (dtype, (1001, 999))
    assert (found == 0).float().mean().item() == pytest.approx(probability, abs=2e-3)
    assert found.max().item() == pytest.approx(1 / (1 - probability), rel=1e-2 if dtype == torch.bfloat16 else 1e-4)
    for columns in found.split(111, 1):  # no column is drawn more often than another
        assert (columns == 0).float().mean().item() == pytest.approx(probability, abs=6e-3)


def test_a_seed_gives_the_same_numbers_whose_gradient_is_zero_where_they_are():
    values = torch.rand(7, 130).add(1).requires_grad_()
    torch.manual_seed(3)
    first, second = drop_out(values, 0.5), drop_out(values, 0.5)
    torch.manual_seed(3)
    assert torch.equal(drop_out(values, 0.5), first)
    assert not torch.equal(first, second)
    first.sum().backward()
    assert torch.allclose(values.grad * values.detach(), first.detach())
    assert 0 < (values.grad == 0).sum() < 7 * 130


def test_nothing_and_everything_can_be_dropped_and_in_evaluation_layers_do_nothing():
    values = torch.ones(100)
    for probability, kept in ((0.0, 1.0), (1e-9, 1.0), (1.0, 0.0)):
        assert torch.equal(drop_out(values, probability), kept * values)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Dropout(0.5, inplace=True), nn.Dropout1d())
    attention.use_cpu_dropout(model)
    assert [type(module) for module in model] == [nn.Linear, CpuDropout, nn.Dropout, nn.Dropout1d]
    assert 0 < (model[1](values) == 0).sum() < 100
    assert model[1].eval()(values) is values
