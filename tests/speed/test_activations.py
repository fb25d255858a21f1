"""--activation_dtype bf16: which tensors are bf16, which stay float32, and what the results are."""

import copy
from types import SimpleNamespace

import pytest
import runs
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertForSequenceClassification,
    ResNetConfig,
)

from shared.config import options
from shared.encoders.masked_head import predict_only_masked
from shared.encoders.packing import packing_is_exact
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError
from shared.models.trainable import repeated_layers
from shared.options.data_options import ModelOptions
from shared.pretrained.from_pretrained import checkpoint_activations
from shared.processes import starting
from shared.run.launch_card import hardware
from shared.speed import compiling
from shared.speed.activations import in_float32, use_activation_dtype

pytestmark = pytest.mark.usefixtures("launched_by_nobody")
SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BF16, CONFIG = torch.bfloat16, ModelOptions(activation_dtype="bf16", output_dir="unused")
HEADS = {
    "classifier": AutoModelForSequenceClassification,
    "masked": AutoModelForMaskedLM,
    "images": AutoModelForImageClassification,
}
CASES = [(kind, head) for kind in ("bert", "roberta", "electra", "distilbert", "modernbert") for head in HEADS]
CASES = [case for case in CASES if case[1] != "images"] + [("vit", "images"), ("deit", "images")]


def tiny(kind, head):
    names = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    if kind == "distilbert":
        names = {"dim": 32, "hidden_dim": 64, "n_layers": 3, "n_heads": 2}
    names |= {"embedding_size": 16} if kind == "electra" else {}
    size = (
        {"image_size": 16, "patch_size": 4, "architectures": ["DeiTForImageClassification"]}
        if head == "images"
        else {"vocab_size": 64, "pad_token_id": 0}
    )
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **names, **size, initializer_range=0.1, num_labels=3)
    return HEADS[head].from_config(config).eval()


def batch(head):
    if head == "images":
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    mask = (torch.arange(20) < torch.tensor([[20], [13], [5]])).long()
    return {"input_ids": torch.arange(60).view(3, 20) % 59 + 1, "attention_mask": mask}


def in_bf16(model):
    model = copy.deepcopy(model)
    use_activation_dtype(CONFIG, model)
    return model


def logits_and_gradients(model, inputs):
    model.zero_grad()
    logits = model(**inputs).logits
    logits.square().sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def joined(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_layers_give_bf16_and_logits_weights_and_gradients_are_float32(kind, head):
    model, inputs = tiny(kind, head), batch(head)
    half = in_bf16(model)
    found = {}
    for name, module in half.named_modules():
        if isinstance(module, nn.LayerNorm | nn.Linear) or module in repeated_layers(half):
            module.register_forward_hook(lambda _, __, output, name=name: found.update({name: output.dtype}))
    logits, gradients = logits_and_gradients(half, inputs)
    inside = [name for name in found if ".embeddings." not in name]
    assert {found[name] for name in inside} == {BF16}
    assert len(inside) > 12
    assert {logits.dtype, *(p.dtype for p in half.parameters())} == {torch.float32}
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    expected, of_float32 = logits_and_gradients(model, inputs)
    assert 1e-5 < runs.distance(logits, expected) < 0.03, "bf16 has 8 bits"
    assert set(gradients) == set(of_float32)
    assert runs.distance(joined(gradients), joined(of_float32)) < 0.05
    assert set(half.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize(("kind", "head"), CASES)
def test_computed_in_float32_it_is_the_model_that_it_was(kind, head):
    """The checks of equality at the start compute in float32, and bf16 is used again behind them."""
    model, inputs = tiny(kind, head), batch(head)
    half = in_bf16(model)
    before = model.state_dict()
    with in_float32(half):
        logits, gradients = logits_and_gradients(half, inputs)
    expected, of_before = logits_and_gradients(model, inputs)
    assert torch.equal(logits, expected)
    assert all(torch.equal(gradients[name], gradient) for name, gradient in of_before.items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in half.state_dict().items())
    assert not torch.equal(half(**inputs).logits, expected)


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_layer_computes_what_a_copy_with_bf16_weights_computes(kind):
    """The oracle: torch's own arithmetic in bf16, to the bit, forward and backward."""
    model = in_bf16(tiny(kind, "masked"))
    layer = repeated_layers(model)[1]
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


def test_norms_compute_in_float32_inside():
    """In bf16 a sum of 4,096 numbers of about 100 would lose all of what varies."""
    model = in_bf16(tiny("bert", "classifier"))
    norm = next(module for module in model.modules() if isinstance(module, nn.LayerNorm))
    wide = type(norm)(4096)
    values = (100 + torch.randn(2, 4096)).to(BF16)
    found = wide(values)
    assert found.dtype == BF16
    assert (found.float() - F.layer_norm(values.float(), (4096,))).abs().max() < 0.02


@pytest.mark.parametrize("how", ["recomputed", pytest.param("compiled", marks=pytest.mark.docs)])
@pytest.mark.parametrize("kind", [pytest.param("bert", marks=pytest.mark.docs), "modernbert"])
def test_it_goes_with_recomputation_and_compiling(how, kind, monkeypatch):
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), num_processes=1, is_fsdp2=False, mixed_precision="no", print=print
    )
    inputs, outputs = batch("classifier"), []
    monkeypatch.setattr(compiling, "BACKEND", "eager")  # traces as any other does
    for changed in (False, True):
        model = tiny(kind, "classifier").train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        if changed and how == "recomputed":
            checkpoint_activations(model)
        flags = {"activation_dtype": "bf16", "torch_compile": changed and how == "compiled"}
        model = adapt_to_device(accelerator, ModelOptions(output_dir="unused", **flags), model)
        outputs.append(logits_and_gradients(model, inputs))
    assert runs.distance(outputs[1][0], outputs[0][0]) < 1e-6
    assert runs.distance(joined(outputs[1][1]), joined(outputs[0][1])) < 1e-6


def test_packing_is_tried_in_float32():
    """In bf16 packed documents differ from single ones by rounding, and would be taken for others."""
    model = in_bf16(tiny("modernbert", "masked"))
    predict_only_masked(model)
    assert packing_is_exact(model)


class MeanForSequenceClassification(BertForSequenceClassification):
    """As someone may write who wants BERT with another head."""


@pytest.mark.parametrize(
    "make",
    [
        lambda: AutoModelForImageClassification.from_config(
            ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
        ),
        lambda: AutoModelForSequenceClassification.from_config(AutoConfig.for_model("albert", **SMALL)),
        lambda: nn.Linear(2, 2),
        lambda: MeanForSequenceClassification(AutoConfig.for_model("bert", **SMALL)),
    ],
    ids=["ResNet", "ALBERT", "a module of one's own", "a head of one's own"],
)
def test_other_models_are_refused(make):
    with pytest.raises(
        UserError, match=r"--activation_dtype bf16 does not suit a .*: it is for .* modernbert.*leave it"
    ):
        use_activation_dtype(CONFIG, make())


def test_a_layer_that_leaves_bf16_is_refused():
    """As another version of transformers might add one."""
    model = in_bf16(tiny("bert", "classifier"))
    model.bert.encoder.layer[1].register_forward_hook(lambda _, __, output: output.float())
    with pytest.raises(UserError, match=r"--activation_dtype: a layer of a BertForSequenceClassification returns .*32"):
        model(**batch("classifier"))


@pytest.mark.parametrize("given", ["bf16", "fp16", "launcher"])
def test_autocast_beside_it_is_refused(monkeypatch, given):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    config = ModelOptions(activation_dtype="bf16", mixed_precision=given)
    with pytest.raises(UserError, match=r"--activation_dtype bf16 computes without autocast, .*--mixed_precision no"):
        starting.check_environment(config, on_cpu=False)


def test_without_the_flag_nothing_changes_and_old_runs_resume():
    model = tiny("bert", "classifier")
    use_activation_dtype(ModelOptions(), model)
    assert {type(module) for module in model.modules() if isinstance(module, nn.Linear)} == {nn.Linear}
    stored = options.plain(ModelOptions(output_dir="run"))
    del stored["activation_dtype"]  # of a run from before the flag
    assert not options.differences(stored, ModelOptions(output_dir="run"))
    changed = options.differences(stored, ModelOptions(output_dir="run", activation_dtype="bf16"))
    assert changed == {"activation_dtype": (None, "bf16")}


def test_the_launch_card_names_it():
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, is_fsdp2=False, mixed_precision="no")
    assert (
        hardware(accelerator, ModelOptions(activation_dtype="bf16"), "DDP")["precision"]
        == "bf16 activations without autocast, weights fp32"
    )
    assert hardware(accelerator, ModelOptions(), "DDP")["precision"] == "fp32"
