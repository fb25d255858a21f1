"""Classifiers give packed texts the logits and gradients of padded rows, or get rows; some need all padding."""

import copy
from types import SimpleNamespace

import families
import numpy as np
import pytest
import runs
import torch
from families import CLASSIFIER, CPU, FAMILIES, MASKED_LM, accelerator, is_short
from torch.nn import functional as F

from shared.encoders.attention import use_packed_attention
from shared.encoders.packing import Packing, holder_of_layers, pack_or_pad, pad_rows, unpack_before_head
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError
from shared.options.data_options import ModelOptions
from shared.speed import first_token
from shared.text.tokenized import Padding

LENGTHS = (40, 23, 23, 9, 2, 1)
WINDOW = {"local_attention": 16, "global_attn_every_n_layers": 2}
HEADS = {  # name: family and what differs from its config
    **{family: (family, {}) for family in FAMILIES},
    "ModernBERT, mean": ("ModernBERT", {"classifier_pooling": "mean"}),
    "ModernBERT, mean, window": ("ModernBERT", {"classifier_pooling": "mean", "num_hidden_layers": 4} | WINDOW),
}


def tiny(name, **more):
    family, own = HEADS[name]
    settings = {"pad_token_id": 0, "num_labels": 3} | own | more
    return families.tiny(CLASSIFIER, family, 60, **settings).eval()


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


def as_in_the_recipe(model):
    return adapt_to_device(accelerator(), ModelOptions(output_dir="unused"), model)


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
    batch = Packing.for_model(model.config)(items(model))
    assert batch["input_ids"].shape == (1, sum(LENGTHS))
    for found, value in zip(families.logits_and_gradients(model, inputs_of(batch)), expected, strict=True):
        assert found.shape == value.shape
        assert runs.distance(found, value) < 1e-5
    others = copy.deepcopy(batch)
    others["input_ids"][0, LENGTHS[0] : -1] += 1  # of all texts except the first and the last one
    changed = (model(**inputs_of(others)).logits - expected[0]).abs().amax(1)
    assert changed[[0, -1]].max() < 1e-4 < changed[1:-1].min(), "a text changes its own logits only"


def packed(model):
    """What `pack_or_pad` gives for the texts of `items`."""
    data, tokenizer = items(model), SimpleNamespace(pad_token_id=0)
    config = SimpleNamespace(packing=True, mixed_precision="no", activation_dtype=None, max_length=48)
    return pack_or_pad(model, data, tokenizer, accelerator(), config, unpack_before_head)


@pytest.mark.parametrize("lengths", [(9, 4, 2), (7, 7), (5,), (1, 1, 1)])
@pytest.mark.parametrize("name", ["RoBERTa", "ALBERT", "ModernBERT, mean"])
def test_texts_of_any_lengths_can_be_packed(name, lengths):
    model = tiny(name)
    with torch.no_grad():
        expected = model(**inputs_of(Padding(0)(items(model, lengths)))).logits
        collate, _ = packed(as_in_the_recipe(model))
        assert runs.distance(model(**inputs_of(collate(items(model, lengths)))).logits, expected) < 1e-5


@pytest.mark.parametrize("name", ["MobileBERT", "GPT-2", "no attention of ours", "does not tell where texts end"])
def test_a_model_that_cannot_be_packed_gets_padded_rows_and_that_is_said(name, monkeypatch):
    model = tiny(name if name in HEADS else "BERT")
    if name.startswith("no "):
        monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    if name.startswith("does not"):
        forward = model.bert.encoder.forward
        model.bert.encoder.forward = lambda *args, **more: forward(*args, **more | {"documents": None})
    collate, said = packed(model)
    assert isinstance(collate, Padding)
    assert not collate.packed
    assert said == f"one text per row, because a {type(model).__name__} cannot be packed exactly"


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


def padding_of(model, precision="no", length=13, max_length=48):
    row, types = np.arange(5, 5 + length), (np.arange(length) > 8).astype(int)
    config = SimpleNamespace(mixed_precision=precision, activation_dtype=None, max_length=max_length)
    collate, message = pad_rows(model, [(row, types, None)], SimpleNamespace(pad_token_id=0), config)
    return collate.multiple_of, message


@pytest.mark.parametrize(
    ("auto", "kind", "sees"), [(CLASSIFIER, "BERT", False), (CLASSIFIER, "FNet", True), (MASKED_LM, "Funnel", True)]
)
def test_a_model_that_sees_padding_gets_rows_of_one_length_with_a_message(auto, kind, sees):
    """tests/models/test_model_families.py has the other families."""
    model = families.tiny(auto, kind, 50).train()
    multiple, message = padding_of(model)
    assert multiple == (48 if sees else 1)
    assert ("because padding changes the output of a Fu" in message or "of a FNet" in message) == sees
    assert padding_of(model, "bf16")[0] == (48 if sees else 8)
    assert padding_of(model, length=5, max_length=9)[0] == (9 if sees else 1)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(("length", "max_length"), [(1, 48), (2, 48), (44, 48), (1, 8), (8, 8)])
def test_the_check_works_with_texts_of_any_length(length, max_length):
    assert padding_of(families.tiny(CLASSIFIER, "BERT", 50), length=length, max_length=max_length)[0] == 1


def test_a_length_that_a_model_cannot_compute_is_refused_in_one_line():
    landmarks = {"segment_means_seq_len": 16, "num_landmarks": 4}
    model = families.tiny(CLASSIFIER, "Nystromformer", 50, **landmarks)
    with pytest.raises(UserError, match=r"^--max_length 48: a Nystromformer\w+ cannot compute rows of that length: "):
        padding_of(model)
    assert "Input language unknown" in runs.refusal(packed, families.small("xmod").eval())
    model = families.tiny(CLASSIFIER, "Nystromformer", 50)  # with the published model's number of landmarks
    assert padding_of(model)[0] == 48
