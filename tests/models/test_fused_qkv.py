"""--fused_qkv: one product for query, key and value gives the results of three, and changes no name of a weight."""

import copy
from types import SimpleNamespace

import families
import pytest
import runs
import torch
import transformers
from torch import nn
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from shared.config import options
from shared.config.options import Options
from shared.encoders import text_models
from shared.errors import UserError
from shared.models import compiling, fused_qkv, image_models
from shared.models.fused_qkv import fuse_qkv, triples
from shared.models.self_check import image_batch, text_batch
from shared.monitoring.flops import FlopCounter
from shared.pretrained.from_pretrained import checkpoint_activations

NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
NO_DROPOUT |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
VIT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS = [("masked", "BERT"), ("masked", "ELECTRA"), ("classifier", "RoBERTa"), ("classifier", "DistilBERT")]


def tiny(auto, name, **more):
    if name == "ViT":
        torch.manual_seed(0)
        config = transformers.ViTConfig(**VIT, image_size=16, patch_size=4, num_labels=3, **NO_DROPOUT | more)
        return transformers.ViTForImageClassification(config).train()
    kind = AutoModelForMaskedLM if auto == "masked" else AutoModelForSequenceClassification
    return families.tiny(kind, name, 60, num_labels=3, **NO_DROPOUT | more).train()


def adapted(model, fused=True, **flags):
    """A copy of the model after `adapt_to_device` of its recipe."""
    accelerator = SimpleNamespace(device=torch.device("cpu"), num_processes=1, is_fsdp2=False, mixed_precision="no")
    config = Options(output_dir="unused", fused_qkv=fused, **flags)
    if not isinstance(model, transformers.ViTForImageClassification):
        return text_models.adapt_to_device(accelerator, config, copy.deepcopy(model))
    own = SimpleNamespace(**vars(config), sync_batchnorm=False, channels_last=False, cudnn_benchmark=False)
    return image_models.adapt_to_device(accelerator, own, copy.deepcopy(model))


def logits_and_gradients(model):
    batch = (image_batch if isinstance(model, transformers.ViTForImageClassification) else text_batch)(model.config)
    model.zero_grad()
    logits = model(**batch).logits
    logits.float().square().sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def products(model, monkeypatch):
    """The number of calls of F.linear in a forward pass."""
    linear, calls = nn.functional.linear, []
    monkeypatch.setattr(nn.functional, "linear", lambda *given: calls.append(1) or linear(*given))
    logits_and_gradients(model)
    monkeypatch.undo()
    return len(calls)


@pytest.mark.parametrize(("auto", "name"), [*KINDS, ("classifier", "ViT")])
def test_logits_gradients_and_names_are_those_of_three_products(auto, name, monkeypatch):
    whole = tiny(auto, name)
    plain, model = adapted(whole, fused=False), adapted(whole)
    for one, other in zip(logits_and_gradients(plain), logits_and_gradients(model), strict=True):
        assert runs.distance(other, one) < 1e-6
    assert list(model.state_dict()) == list(whole.state_dict())
    fused = sum("fused" in vars(query) for query, _, _ in triples(model))
    assert fused == (1 if auto == "classifier" else 2), "a last layer for the first token stays as it is"
    assert products(plain, monkeypatch) - products(model, monkeypatch) == 2 * fused


@pytest.mark.parametrize("how", ["recomputed", pytest.param("compiled", marks=pytest.mark.docs), "bf16", "no bias"])
def test_what_else_is_done_to_layers_goes_with_it(how, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "eager")  # traces as any other does
    torch._dynamo.reset()
    whole = tiny("classifier", "ViT", qkv_bias=False) if how == "no bias" else tiny("masked", "BERT")
    if how == "recomputed":
        checkpoint_activations(whole)
    flags = {"compiled": {"torch_compile": True}, "bf16": {"activation_dtype": "bf16"}}.get(how, {})
    plain, model = (adapted(whole, fused, **flags) for fused in (False, True))
    for one, other in zip(logits_and_gradients(plain), logits_and_gradients(model), strict=True):
        assert runs.distance(other, one) < (0.02 if how == "bf16" else 1e-6)


def test_a_copy_of_the_model_computes_with_its_own_weights():
    """As the average of --ema_decay does."""
    model = adapted(tiny("classifier", "ViT"))
    average, (expected, _) = copy.deepcopy(model), logits_and_gradients(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(logits_and_gradients(average)[0], expected)


def test_a_layer_with_another_input_computes_its_own_product():
    layers = [nn.Linear(4, 4) for _ in range(3)]
    one, other = torch.randn(2, 4), torch.randn(2, 4)
    expected = layers[0](one), layers[1](other), layers[2](other)
    fused_qkv.fuse(*layers)
    for layer, given, result in zip(layers, (one, other, other), expected, strict=True):
        assert torch.allclose(layer(given), result)
    assert layers[0].fused.computed is None, "no tensor is kept"


def test_the_operations_of_all_three_products_are_counted():
    counts = []
    for fused in (False, True):
        model = adapted(tiny("masked", "BERT"), fused)
        counter = FlopCounter(model)
        logits_and_gradients(model)
        counts.append(counter.stop())
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", ["ModernBERT", "ALBERT", "T5"])
def test_a_model_without_three_layers_that_are_known_is_refused(name):
    with pytest.raises(UserError, match=r"^--fused_qkv does not suit a .*: it is for models of transformers"):
        fuse_qkv(Options(fused_qkv=True), tiny("classifier", name))


def test_a_model_whose_result_would_change_is_refused(monkeypatch):
    compute = fused_qkv.compute_all
    monkeypatch.setattr(fused_qkv, "compute_all", lambda query, hidden: 1.01 * compute(query, hidden))
    model = tiny("masked", "BERT")
    with pytest.raises(UserError, match=r"^--fused_qkv does not work with this BertForMaskedLM"):
        fuse_qkv(Options(fused_qkv=True), model)
    assert not [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.docs  # it takes long; test_activation_dtype.py has the gradient of a step
@pytest.mark.usefixtures("one_cpu_process_without_a_picture")
def test_a_run_ends_with_the_weights_of_three_products_and_resumes_with_the_same_bytes(texts, tmp_path):
    mlm = runs.load_recipe("mlm")
    flags = [*texts, *runs.TINY, "--model_type", "bert", "--checkpointing_steps", 4]
    middle = ["--fused_qkv", "--resume_from_checkpoint", tmp_path / "fused/checkpoints/step_00000004"]
    for name, more in {"plain": [], "fused": ["--fused_qkv"], "again": middle}.items():
        words = [*flags, *more, "--output_dir", tmp_path / name]
        mlm.main(options.parse(mlm.Config, list(map(str, words))))
    plain, fused = (runs.weights_that_learn(tmp_path / name) for name in ("plain", "fused"))
    assert runs.distance(fused, plain) < 1e-5
    one, other = ((tmp_path / name / "model/model.safetensors").read_bytes() for name in ("fused", "again"))
    assert one == other
