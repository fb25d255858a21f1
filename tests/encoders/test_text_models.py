"""Our attention and our masks on the device give the results of those of transformers."""

from types import SimpleNamespace

import pytest
import runs
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification
from transformers.masking_utils import (
    bidirectional_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
)

from benchmarks.harness.host_waits import Operations
from shared.encoders import text_models
from shared.encoders.attention import LONGEST, attend
from shared.encoders.text_models import attend_by_products, mask_by_row, mask_on_device
from shared.options.data_options import ModelOptions


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
def test_the_mask_is_applied_without_reading_the_batch_and_gives_the_same_logits(kind, padded):
    model, inputs = tiny(kind), batch(padded)
    expected, waits = logits_and_waits(model, inputs)
    assert waits, "transformers reads the batch on the host; otherwise mask_on_device is not needed"
    mask_on_device(model)
    given, waits = logits_and_waits(model, inputs)
    assert not waits
    assert (given - expected).abs().max() < 1e-5
    assert (logits_and_waits(model, batch(not padded))[0] - given).abs().max() > 1e-3, "the mask changes the logits"


def test_rotary_angles_are_computed_without_tf32():
    model, seen = tiny("modernbert"), []
    rotary = next(module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding"))
    forward = rotary.forward
    rotary.forward = lambda *given: seen.append(torch.backends.cuda.matmul.allow_tf32) or forward(*given)
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
    try:
        text_models.compute_exact_angles(model)
        model(**batch(padded=False))
        assert seen
        assert not any(seen)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(("device", "precision"), [("cuda", "bf16"), ("cpu", "bf16"), ("cpu", "no")])
def test_a_module_that_is_not_from_transformers_is_not_changed(device, precision):
    model = torch.nn.Linear(2, 2)
    accelerator = SimpleNamespace(device=torch.device(device), mixed_precision=precision)
    assert text_models.adapt_to_device(accelerator, ModelOptions(output_dir="unused"), model) is model


def test_a_model_with_another_attention_keeps_it():
    model = tiny("bert")
    model.set_attn_implementation("eager")
    mask_on_device(model)
    assert model.config._attn_implementation == "eager"


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
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_encoders_attend_by_products_in_bf16_and_give_the_same_logits(kind, padded, monkeypatch):
    model, inputs = tiny(kind), batch(padded)
    expected, calls = model(**inputs).logits, []
    monkeypatch.setattr(text_models, "attend", lambda *given: calls.append(given) or attend(*given))
    attend_by_products(model)
    calls.clear()  # without those of the check on a tiny batch
    assert (model(**inputs).logits - expected).abs().max() < 1e-5
    assert len(calls) == model.config.num_hidden_layers
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(**inputs).logits.float() - expected).abs().max() < 0.05


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "modernbert"])
def test_small_masks_give_the_same_bytes(kind, padded, monkeypatch):
    model, inputs = tiny(kind), batch(padded)
    expected, masks = model(**inputs).logits, []
    attend_in_torch = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *given, attn_mask=None, **more: (
            masks.append(attn_mask) or attend_in_torch(*given, attn_mask=attn_mask, **more)
        ),
    )
    mask_by_row(model)
    masks.clear()  # without those of the check on a tiny batch
    assert torch.equal(model(**inputs).logits, expected)
    assert len(masks) == model.config.num_hidden_layers
    if kind != "modernbert":
        assert all(mask is None if not padded else mask.shape == (3, 1, 1, 20) for mask in masks)


def test_a_decoder_keeps_its_own_attention():
    torch.manual_seed(0)
    config = AutoConfig.for_model("gpt2", n_embd=16, n_layer=2, n_head=2, vocab_size=50, pad_token_id=0)
    model, inputs = AutoModelForSequenceClassification.from_config(config).eval(), batch(padded=True)
    expected = model(**inputs).logits
    attend_by_products(model)
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize(("window", "cheap"), [(8, False), (20, False), (21, True), (None, True)])
def test_a_mask_of_padding_only_is_the_attention_mask_and_others_are_made_by_transformers(padded, window, cheap):
    mask = batch(padded)["attention_mask"].bool()
    function = bidirectional_mask_function if window is None else sliding_window_bidirectional_mask_function(window)
    arguments = {"batch_size": 3, "q_length": 20, "kv_length": 20, "mask_function": function, "local_size": window}
    arguments |= {"attention_mask": mask, "allow_is_causal_skip": False}
    expected = sdpa_mask(**arguments)
    given = text_models.always_masked(**arguments, allow_is_bidirectional_skip=True)
    assert torch.equal(given, expected)
    assert (given.data_ptr() == mask.data_ptr()) == cheap
    small = text_models.small_mask(**arguments, allow_is_bidirectional_skip=True)
    if cheap:
        assert small is None if not padded else torch.equal(small, mask[:, None, None])
    else:
        assert torch.equal(small, expected)
    for function in (text_models.always_masked, text_models.small_mask):
        unlike_any = function(**arguments)  # transformers does not say that only padding matters
        assert torch.equal(unlike_any, expected)
        assert unlike_any.data_ptr() != mask.data_ptr()
