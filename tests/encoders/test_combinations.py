"""Recomputation, adapters, bf16 and compiled layers go with faster computation: the results are those of plain rows."""

from types import SimpleNamespace

import families
import numpy as np
import pytest
import runs
import torch
from families import CLASSIFIER, MASKED_LM, NO_DROPOUT, accelerator, compiled, is_short

from shared.encoders.masked_head import predict_only_masked
from shared.encoders.packing import pack_or_pad, unpack_before_head
from shared.encoders.text_models import adapt_to_device, adapted_layers, add_adapters
from shared.pretrained.from_pretrained import checkpoint_activations
from shared.speed import layers
from shared.text.tokenized import Padding, Rows

LENGTHS = np.array([40, 23, 23, 9, 2, 1])
FLAGS = {
    "recomputed": {"gradient_checkpointing": True},
    "adapters": {"model_name_or_path": "base", "lora_rank": 4},
    "autocast": {"mixed_precision": "bf16"},
    "activations": {"activation_dtype": "bf16"},
    "compiled": {"torch_compile": True},
}
TOKENS = np.random.default_rng(0).integers(5, 59, LENGTHS.sum())
MASKED = np.flatnonzero(np.arange(LENGTHS.sum()) % 4 == 1)  # of which the last document has none
DOCS = pytest.mark.docs


def classifier(model, settings):
    """The batches of texts as rows, and as the recipe makes them."""
    texts, tokenizer = Rows(LENGTHS, TOKENS), SimpleNamespace(pad_token_id=0)
    collate, _ = pack_or_pad(model, [(TOKENS[:40], None, None)], tokenizer, *settings, unpack_before_head)
    assert collate.packed == settings[1].packing
    return Padding(0)(texts), collate(texts)


def masked_lm(model, settings):
    """The batches of documents as rows, and as the recipe makes them."""
    read = Rows(LENGTHS, TOKENS, masked=MASKED)
    collate, _ = pack_or_pad(model, [TOKENS[:40]], SimpleNamespace(pad_token_id=0), *settings)
    assert collate.packed
    return Padding(0)(read), collate(read)


@pytest.mark.parametrize("how", [*(how for how in FLAGS if how != "compiled"), pytest.param("compiled", marks=DOCS)])
@pytest.mark.parametrize(
    ("family", "packing", "auto", "batches_of"),
    [
        ("BERT", False, CLASSIFIER, classifier),
        ("ModernBERT", True, CLASSIFIER, classifier),
        ("BERT", True, MASKED_LM, masked_lm),
        ("ModernBERT", True, MASKED_LM, masked_lm),
        pytest.param("DistilBERT", True, CLASSIFIER, classifier, marks=DOCS),
        pytest.param("BERT", True, CLASSIFIER, classifier, marks=DOCS),
    ],
)
def test_logits_and_gradients_are_those_of_plain_rows(family, packing, auto, batches_of, how, monkeypatch):
    monkeypatch.setattr(layers, "BACKEND", "eager")  # traces as any other does
    settings = runs.load_recipe("nlp").Config(output_dir="unused", packing=packing, max_length=48, **FLAGS[how])
    whole, model = (families.tiny(auto, family, 60, **NO_DROPOUT).train() for _ in range(2))
    if auto is MASKED_LM:
        predict_only_masked(whole, packing=False)
        predict_only_masked(model, packing)
    if how == "recomputed":
        checkpoint_activations(model)
    if how == "adapters":
        add_adapters(settings, whole)
    machine = accelerator("bf16" if how == "autocast" else "no")
    adapt_to_device(machine, settings, model)
    rows, batch = batches_of(model, (machine, settings))
    assert is_short(model) == (auto is MASKED_LM or family != "ModernBERT")
    assert compiled(model) == (how == "compiled")
    for each in (whole, model):  # B begins with zeros
        generator = torch.Generator().manual_seed(1)
        for _, layer in adapted_layers(each):
            layer.lora_B["default"].weight.data.normal_(0, 0.3, generator=generator)
    expected = families.logits_and_gradients(whole, rows)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        found = families.logits_and_gradients(model, batch)
    assert expected[0].shape == found[0].shape
    for one, other in zip(expected, found, strict=True):
        assert runs.distance(other.float(), one) < (0.05 if how in ("autocast", "activations") else 1e-5)
