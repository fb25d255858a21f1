"""Classifiers give packed texts the logits and gradients of padded rows, or are recognized as unable to."""

import copy
from types import SimpleNamespace

import families
import numpy as np
import pytest
import runs
import torch
from families import FAMILIES
from torch.nn import functional as F
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from shared.encoders.packed_texts import PackedTexts, holder_of_layers, pack_or_pad_texts, unpack_before_head
from shared.encoders.packing import use_packed_attention
from shared.encoders.padding import padding_for
from shared.encoders.text_models import SMALL_MASK, adapt_to_device
from shared.models.trainable import is_short
from shared.options.data_options import ModelOptions
from shared.pretrained.from_pretrained import checkpoint_activations
from shared.speed import compiling, first_token
from shared.text.tokenized import Padding

CPU = torch.device("cpu")
LENGTHS = (40, 23, 23, 9, 2, 1)
NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
NO_DROPOUT |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
WINDOW = {"local_attention": 16, "global_attn_every_n_layers": 2}
HEADS = {  # name: family and what differs from its config
    **{family: (family, {}) for family in FAMILIES},
    "ModernBERT, mean": ("ModernBERT", {"classifier_pooling": "mean"}),
    "ModernBERT, mean, window": ("ModernBERT", {"classifier_pooling": "mean", "num_hidden_layers": 4} | WINDOW),
}


def tiny(name, **more):
    family, own = HEADS[name]
    settings = {"pad_token_id": 0, "num_labels": 3} | own | more
    return families.tiny(AutoModelForSequenceClassification, family, 60, **settings).eval()


def items(model, lengths=LENGTHS):
    """What `TokenizedText` gives for texts that begin with token 2 and end with token 3, as T5 needs it."""
    random, found = np.random.default_rng(0), []
    for length in lengths:
        ids = random.integers(5, 59, length).astype(np.uint16)
        ids[0], ids[-1] = 2, 3
        types = (np.arange(length) > length // 2).astype(np.uint8)
        found.append((ids, types if getattr(model.config, "type_vocab_size", 0) > 1 else None, length % 3))
    return found


def inputs_of(batch):
    return {name: value for name, value in batch.items() if name != "labels"}


def as_in_the_recipe(model, precision="no", compiled=False):
    """The model after `adapt_to_device` on a CPU."""
    accelerator = SimpleNamespace(device=CPU, num_processes=1, is_fsdp2=False, mixed_precision=precision, print=print)
    return adapt_to_device(accelerator, ModelOptions(output_dir="unused", torch_compile=compiled), model)


def packed_in_table(family):
    """Whether the table of docs/models.md says that mlm.py packs a family, except for decoders, which it lacks."""
    page = (runs.ROOT / "docs/models.md").read_text()
    (row,) = (line for line in page.splitlines() if line.startswith(f"| {family} |"))
    return "| packed |" in row


@pytest.mark.parametrize("name", HEADS)
def test_packed_texts_have_the_logits_and_gradients_of_padded_rows_or_the_model_stays_as_it_is(name):
    whole = tiny(name)
    model = as_in_the_recipe(copy.deepcopy(whole))
    rows, attention = Padding(0)(items(model)), model.config._attn_implementation
    expected = families.logits_and_gradients(whole, inputs_of(rows))
    assert unpack_before_head(model) == packed_in_table(HEADS[name][0])
    assert model.config._attn_implementation == attention
    if not packed_in_table(HEADS[name][0]):
        assert not holder_of_layers(model)._forward_hooks
        assert runs.distance(model(**inputs_of(rows)).logits, expected[0]) < 1e-5
        return
    assert is_short(model) == (model.config.model_type in first_token.FAMILIES)
    use_packed_attention(model, CPU, "no")
    batch = PackedTexts.for_model(model.config)(items(model))
    assert batch["input_ids"].shape == (1, sum(LENGTHS))
    for found, value in zip(families.logits_and_gradients(model, inputs_of(batch)), expected, strict=True):
        assert found.shape == value.shape
        assert runs.distance(found, value) < 1e-5
    others = copy.deepcopy(batch)
    others["input_ids"][0, LENGTHS[0] : -1] += 1  # of all texts except the first and the last one
    changed = (model(**inputs_of(others)).logits - expected[0]).abs().amax(1)
    assert changed[[0, -1]].max() < 1e-4 < changed[1:-1].min(), "a text changes its own logits only"


def packed(model, precision="no"):
    """What `pack_or_pad_texts` gives for the texts of `items`."""
    data, tokenizer = items(model), SimpleNamespace(pad_token_id=0)
    config = SimpleNamespace(packing=True, mixed_precision=precision, activation_dtype=None, max_length=48)
    return pack_or_pad_texts(model, data, tokenizer, SimpleNamespace(device=CPU), config)


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.docs) for name in ("BERT", "DistilBERT")), "ModernBERT, mean"]
)
@pytest.mark.parametrize("how", ["recomputed", pytest.param("compiled", marks=pytest.mark.docs), "in bf16"])
def test_what_else_is_done_to_layers_goes_with_packing(name, how, monkeypatch):
    whole, half = tiny(name, **NO_DROPOUT).train(), how == "in bf16"
    model = copy.deepcopy(whole)
    if how == "recomputed":
        checkpoint_activations(model)
    monkeypatch.setattr(compiling, "BACKEND", "eager")  # traces as any other does
    model = as_in_the_recipe(model, "bf16" if half else "no", compiled=how == "compiled")
    collate, said = packed(model, "bf16" if half else "no")
    assert said.startswith("; packed without padding, attention over documents padded")
    expected = families.logits_and_gradients(whole, inputs_of(Padding(0)(items(model))))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        found = families.logits_and_gradients(model, inputs_of(collate(items(model))))
    for one, other in zip(expected, found, strict=True):
        assert runs.distance(other.float(), one) < (0.05 if half else 1e-5)


@pytest.mark.parametrize("lengths", [(9, 4, 2), (7, 7), (5,), (1, 1, 1)])
@pytest.mark.parametrize("name", ["RoBERTa", "ALBERT", "ModernBERT, mean"])
def test_texts_of_any_lengths_can_be_packed(name, lengths):
    model = tiny(name)
    with torch.no_grad():
        expected = model(**inputs_of(Padding(0)(items(model, lengths)))).logits
        collate, _ = packed(as_in_the_recipe(model))
        assert runs.distance(model(**inputs_of(collate(items(model, lengths)))).logits, expected) < 1e-5


@pytest.mark.parametrize("name", ["MobileBERT", "GPT-2", "no attention of transformers"])
def test_a_model_that_cannot_be_packed_gets_padded_rows_and_that_is_said(name, monkeypatch):
    model = tiny("BERT" if name.startswith("no ") else name)
    if name.startswith("no "):
        monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    collate, said = packed(model)
    assert isinstance(collate, Padding)
    assert not collate.packed
    assert said == f"; one text per row, because a {type(model).__name__} cannot be packed exactly"


def test_a_model_that_does_not_tell_its_attention_where_texts_end_is_not_packed():
    model = tiny("BERT")
    forward = model.bert.encoder.forward
    model.bert.encoder.forward = lambda *args, **more: forward(*args, **more | {"documents": None})
    assert not unpack_before_head(model)


def test_a_batch_has_the_tokens_positions_types_and_labels_of_its_texts():
    model = tiny("BERT")
    texts = items(model, (4, 2, 1))
    batch = PackedTexts(2)(texts)
    assert batch["input_ids"].tolist() == [np.concatenate([ids for ids, _, _ in texts]).tolist()]
    assert batch["token_type_ids"].tolist() == [np.concatenate([types for _, types, _ in texts]).tolist()]
    assert batch["labels"].tolist() == [label for *_, label in texts]
    assert batch["position_ids"].tolist() == [[2, 3, 4, 5, 2, 3, 2]]
    assert batch["documents"].ends.tolist() == [0, 4, 6, 7]
    assert batch["documents"].longest == 4
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert PackedTexts(2).padded_lengths(np.array([4, 2, 1])).tolist() == [4, 2, 1]


def test_flash_attention_gets_one_query_per_text_in_a_short_last_layer(monkeypatch):
    """The kernel runs on GPUs only; here a stand-in computes what it is asked for, one text after the other."""
    calls = []

    def stand_in(q, k, v, ends_q, ends_k, longest_q, longest_k, *_, scale, **window):
        calls.append((len(q), longest_q, longest_k))
        parts = [part.tensor_split(ends[1:-1].long()) for part, ends in ((q, ends_q), (k, ends_k), (v, ends_k))]
        texts = [[part.transpose(0, 1) for part in text] for text in zip(*parts, strict=True)]  # [heads, tokens, width]
        return [torch.cat([F.scaled_dot_product_attention(*text, scale=scale).transpose(0, 1) for text in texts])]

    whole = tiny("BERT")
    model = as_in_the_recipe(copy.deepcopy(whole))
    collate, _ = packed(model)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", stand_in)
    model.set_attn_implementation("packed_varlen")
    batches = Padding(0)(items(model)), collate(items(model))
    with torch.no_grad():
        expected, found = (each(**inputs_of(batch)).logits for each, batch in zip((whole, model), batches, strict=True))
    assert runs.distance(found, expected) < 1e-5
    assert calls == [(sum(LENGTHS), 40, 40), (len(LENGTHS), 1, 40)]


def test_a_head_with_several_outputs_per_token_is_packed_padded_and_checked_without_a_warning(capsys):
    model = families.tiny(AutoModelForQuestionAnswering, "BERT", 60, pad_token_id=0).eval()
    assert adapt_to_device(SimpleNamespace(device=CPU, mixed_precision="no"), ModelOptions(), model) is model
    assert model.config._attn_implementation == SMALL_MASK
    texts = items(model)
    settings = SimpleNamespace(mixed_precision="no", activation_dtype=None, max_length=48)
    assert padding_for(model, texts[0][0], SimpleNamespace(pad_token_id=0), settings) == (1, "")
    padded = model(**inputs_of(Padding(0)(texts)))
    assert unpack_before_head(model)
    use_packed_attention(model, CPU, "no")
    packed = model(**inputs_of(PackedTexts.for_model(model.config)(texts)))
    for name in ("start_logits", "end_logits"):
        for row, length in enumerate(LENGTHS):
            assert torch.allclose(packed[name][row, :length], padded[name][row, :length], atol=1e-5)
    assert "warning" not in "".join(capsys.readouterr())
