"""A last layer that computes masked tokens only gives the same logits and gradients, and is used only where it may."""

from types import SimpleNamespace

import families
import numpy as np
import pytest
import runs
import torch
from families import CPU, NO_DROPOUT, accelerator, is_short
from families import MASKED_LM as MLM
from transformers import AttentionInterface, AutoModelForTokenClassification, BertForMaskedLM

from benchmarks.harness.host_waits import compiled_graphs
from shared.encoders import masked_head
from shared.encoders.attention import padded_attention, use_packed_attention
from shared.encoders.masked_head import predict_only_masked
from shared.encoders.packing import Packing
from shared.encoders.text_models import adapt_to_device
from shared.speed import layers
from shared.text.tokenized import Padding, Rows

TAGS = AutoModelForTokenClassification
LENGTHS, COUNTS = (40, 17, 17, 9, 1), (7, 0, 4, 9, 1)  # tokens of the documents, and masked ones of these
GLOBAL, LOCAL = ({"local_attention": 16, "global_attn_every_n_layers": every} for every in (1, 2))  # the last layer
KINDS = {
    **{name: (name, {}) for name in ("BERT", "RoBERTa", "CamemBERT", "XLM-R", "ELECTRA", "DistilBERT")},
    **{"ModernBERT": ("ModernBERT", GLOBAL), "ModernBERT, local": ("ModernBERT", LOCAL)},
}


def settings(**changed):
    """Those of a run of the recipe."""
    return runs.load_recipe("mlm").Config(output_dir="unused", **changed)


def tiny(kind="BERT", auto=MLM, packing=True, **more):
    """A model that predicts masked tokens only, before `adapt_to_device`."""
    family, own = KINDS.get(kind, (kind, {}))
    model = families.tiny(auto, family, 60, num_labels=3, **NO_DROPOUT | own | more).train()
    predict_only_masked(model, packing)
    return model


def whole_and_short(kind="BERT", auto=MLM, **flags):
    """Two models with packed attention; the last layer of the second computes masked tokens only."""
    whole, short = (tiny(kind, auto, packing) for packing in (False, True))
    adapt_to_device(accelerator(), settings(**flags), short)
    for model in (whole, short):
        use_packed_attention(model, CPU, "no")
    assert (is_short(whole), is_short(short)) == (False, True)
    return whole, short


def documents(lengths=LENGTHS, counts=COUNTS):
    """What `MaskedDocuments.read_micro_batch` gives."""
    generator, begins = np.random.default_rng(0), np.cumsum(lengths) - lengths
    tokens = generator.integers(5, 59, sum(lengths))
    chosen = [generator.permutation(length)[:count] for length, count in zip(lengths, counts, strict=True)]
    masked = np.sort(np.concatenate([begin + places for begin, places in zip(begins, chosen, strict=True)]))
    return Rows(np.array(lengths), tokens, None, tokens[masked], masked)


def packed(model, read=None):
    """A batch without labels."""
    return Packing.for_model(model.config)((read or documents())._replace(targets=None))


def check_equal(whole, short, batch=None, most=1e-5):
    pairs = [families.logits_and_gradients(model, batch or packed(model)) for model in (whole, short)]
    for one, other in zip(*pairs, strict=True):
        assert runs.distance(other, one) < most


def rows_of_last_layer(model, batch):
    """The number of tokens that the last layer returns."""
    layers, _ = masked_head.FAMILIES[model.config.model_type]
    found = []
    hook = model.base_model.get_submodule(layers)[-1].register_forward_hook(lambda *call: found.append(call[-1].shape))
    model(**batch)
    hook.remove()
    assert found[0][0] == 1
    return found[0][1]


@pytest.mark.parametrize(
    ("kind", "auto"),
    [*((kind, MLM) for kind in KINDS), ("BERT", TAGS), ("ModernBERT", TAGS), ("ModernBERT, local", TAGS)],
)
def test_logits_and_gradients_equal_those_of_the_whole_layer(kind, auto):
    whole, short = whole_and_short(kind, auto)
    check_equal(whole, short)
    assert rows_of_last_layer(short, packed(short)) == sum(COUNTS)
    assert rows_of_last_layer(whole, packed(whole)) == sum(LENGTHS)
    assert set(short.state_dict()) == set(whole.state_dict()), "the exported model is the same"
    for model in (whole, short):
        model.set_attn_implementation("sdpa")
    rows, ids = Padding(0)(documents()._replace(targets=None)), {"input_ids": torch.arange(14).view(2, 7)}
    for batch in (rows, ids):  # padded rows, and rows without masked tokens: all logits
        torch.testing.assert_close(short(**batch).logits, whole(**batch).logits)


@pytest.mark.parametrize("kind", ["BERT", "ModernBERT, local"])
def test_any_number_of_tokens_of_a_document_can_be_masked(kind):
    whole, short = whole_and_short(kind)
    for counts in ((40, 17, 17, 9, 1), (0, 0, 0, 0, 1), (3, 3, 3, 3, 0), (0, 2, 0, 0, 0)):
        check_equal(whole, short, packed(short, documents(counts=counts)))
    check_equal(whole, short, packed(short, documents((20, 20, 20), (5, 5, 5))))  # nothing is padded
    found = documents()
    none = packed(short, found._replace(masked=found.masked[:0]))
    assert rows_of_last_layer(short, none) == len(found.ids)
    assert short(**none).logits.shape == whole(**none).logits.shape == (0, 60)


def test_a_local_last_layer_is_whole_only_if_the_kernel_does_not_know_the_places_of_the_masked_tokens():
    whole, short = whole_and_short("ModernBERT, local")
    window = short.model.layers[-1].attn.sliding_window
    assert max(LENGTHS) > window
    wide, narrow = packed(short), packed(short, documents((window, 5), (3, 2)))
    AttentionInterface.register("another", padded_attention)
    for kernel, computed in {"packed_padded": sum(COUNTS), "another": sum(LENGTHS)}.items():
        short.set_attn_implementation(kernel)
        assert rows_of_last_layer(short, wide) == computed
        assert rows_of_last_layer(short, narrow) == 5
        check_equal(whole, short, wide)
        check_equal(whole, short, narrow)


@pytest.mark.docs
@pytest.mark.parametrize("kind", ["BERT", "ModernBERT, local"])
def test_compiled_layers_do_not_compile_again_for_another_number_of_masked_tokens(kind, monkeypatch):
    monkeypatch.setattr(layers, "BACKEND", "eager")  # traces as any other does
    torch._dynamo.reset()
    whole, short = whole_and_short(kind, torch_compile=True)
    graphs = []
    for counts in ((7, 0, 4, 9, 1), (8, 3, 5, 2, 1), (9, 1, 4, 3, 1), (11, 2, 2, 2, 1)):
        check_equal(whole, short, packed(short, documents(counts=counts)))
        graphs.append(compiled_graphs())
    assert graphs[1] == graphs[-1]


class OwnForMaskedLM(BertForMaskedLM):
    """A user's own class, which may read every token."""


@pytest.mark.parametrize(
    "settings",
    [
        {"packing": False},
        {"attn_implementation": "eager"},
        {"kind": "ALBERT"},
        {"auto": SimpleNamespace(from_config=OwnForMaskedLM)},
    ],
    ids=["rows", "eager", "layers that are one", "a class of one's own"],
)
def test_other_models_and_runs_compute_the_whole_layer(settings):
    model = tiny(**settings)
    assert not is_short(model)
    assert not [module for module in model.base_model.modules() if "forward" in vars(module)]
    assert model.config._attn_implementation == settings.get("attn_implementation", "sdpa")
