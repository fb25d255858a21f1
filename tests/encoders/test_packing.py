"""Packed documents give the same outputs as single ones; on masked tokens, the sparse head equals the dense one."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import runs
import torch
from families import CPU, MASKED_LM, small
from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn import functional as F

from shared.encoders import attention
from shared.encoders.attention import use_packed_attention
from shared.encoders.masked_head import predict_only_masked
from shared.encoders.packing import Packing, pack_or_pad, packing_is_exact
from shared.speed.first_token import Documents
from shared.text.tokenized import Padding, Rows

KINDS = ("bert", "roberta", "modernbert")
PAD, LONGEST = 1, 60  # a padding id that is not 0: RoBERTa counts from it


def tiny(kind, **more):
    """A model with random weights that are large enough to show attention to a wrong token."""
    sizes = {"vocab_size": 320, "max_position_embeddings": LONGEST + PAD + 1, "pad_token_id": PAD}
    sizes |= {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    sizes |= {"num_hidden_layers": 4, "local_attention": 16, "global_attn_every_n_layers": 2}
    return small(kind, MASKED_LM, **sizes | more).eval()


def read(lengths, seed=0, share=0.3):
    """What MaskedDocuments.read_micro_batch gives, for documents of these lengths."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(5, 320, sum(lengths))
    masked = np.sort(generator.choice(len(tokens), max(1, int(share * len(tokens))), replace=False))
    return Rows(np.array(lengths), tokens, None, generator.integers(5, 320, len(masked)), masked)


def alone(model, tokens, lengths):
    """Logits [T, vocabulary], computed one document at a time."""
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    return torch.cat([model(input_ids=torch.from_numpy(document)[None]).logits[0] for document in documents])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[60, 37, 37, 12, 3, 1], [20, 20, 20], [60]])
def test_packed_and_padded_documents_have_the_loss_and_gradient_of_single_ones_and_a_dense_head(kind, lengths):
    found = _, tokens, _, labels, masked = read(lengths)
    dense, targets = tiny(kind).train(), torch.from_numpy(labels)
    expected = alone(dense, tokens, lengths)
    loss = F.cross_entropy(expected[masked], targets)
    loss.backward()
    for packed in (True, False):
        sparse = tiny(kind).train()
        predict_only_masked(sparse, packing=False)
        if packed:
            use_packed_attention(sparse, CPU, "no")
        batch = (Packing.for_model(sparse.config) if packed else Padding(PAD))(found)
        assert torch.equal(batch.pop("labels"), targets)
        assert not packed or batch["input_ids"].shape == (1, sum(lengths)), "only real tokens are computed"
        logits = sparse(**batch).logits
        assert logits.shape == (len(masked), 320), "no logits for other positions"
        F.cross_entropy(logits, targets).backward()
        assert runs.distance(logits, expected[masked]) < 1e-5
        gradients = (torch.cat([p.grad.flatten() for p in model.parameters()]) for model in (sparse, dense))
        assert runs.distance(*gradients) < 1e-5
    positions = Packing.for_model(dense.config)(Rows(np.array(lengths), tokens))["position_ids"]
    leaking = dense(torch.from_numpy(tokens)[None], position_ids=positions).logits[0]
    assert len(lengths) == 1 or (leaking - expected).abs().max() > 1e-3, "otherwise documents see each other"
    if kind == "modernbert":
        wide = alone(tiny(kind, local_attention=200), tokens, lengths)
        assert (wide - expected).abs().max() > 1e-3, "otherwise all layers may attend globally"


@pytest.mark.parametrize("kind", ["bert", "deberta-v2", "mpnet", "megatron-bert", "squeezebert", "nothing apart"])
def test_the_logits_of_masked_tokens_are_those_of_the_dense_head_in_any_model(kind):
    """This holds whether or not the model passes its arguments to its encoder, and without a separate encoder."""
    model = tiny("bert" if kind == "nothing apart" else kind)
    if kind == "nothing apart":
        model.base_model_prefix = ""
        assert model.base_model is model
    batch = Padding(PAD)(read([9, 4, 2]))
    del batch["labels"]
    masked = batch.pop("masked")
    expected = model(**batch).logits
    predict_only_masked(model, packing=False)
    assert runs.distance(model(**batch, masked=masked).logits, expected.flatten(0, 1)[masked]) < 1e-5
    assert torch.equal(model(**batch).logits, expected), "a call without `masked` gives all logits, as before"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 2**12))
def test_groups_hold_neighbours_of_similar_length_and_are_worth_their_calls(lengths, least):
    lengths = sorted(lengths, reverse=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "ENOUGH_WORK", least)
        starts = attention.groups_of_similar_length(lengths, width=8)
    assert starts == sorted({0, *starts})
    assert starts[-1] < len(lengths)
    for start, end in itertools.pairwise([*starts, len(lengths)]):
        longest = lengths[start]
        if end < len(lengths):
            assert (end - start) * longest**2 * 8 >= least
            assert lengths[end] < 0.8 * longest
        # the last one that is much shorter came before the group was large enough
        short = [document for document in range(start, end) if lengths[document] < 0.8 * longest]
        assert not short or (short[-1] - start) * longest**2 * 8 < least


@pytest.mark.parametrize(
    ("which", "window"),
    [("all", None), ("all", 5), ("some", None), ("some", 5), ("first", None)],  # a layer with a window is not shortened
)
def test_attention_in_groups_is_that_of_all_documents_at_once(which, window, monkeypatch):
    lengths = [23, 22, 13, 12, 12, 4, 1]
    documents = Packing()(Rows(np.array(lengths), np.ones(sum(lengths), np.int64)))["documents"]
    queries = Documents(torch.arange(8, dtype=torch.int32), 1) if which == "first" else None
    if which == "some":  # two of the first document, none of the second, ...
        places = torch.tensor([0, 20, 45, 46, 57, 58, 59, 60, 70, 86])
        ends = torch.searchsorted(places, documents.ends.to(torch.int64)).to(torch.int32)
        queries = Documents(ends, int(ends.diff().max()), places)
    torch.manual_seed(0)
    query = torch.randn(1, 2, sum(lengths) if queries is None else int(queries.ends[-1]), 4)
    key, value = torch.randn(2, 1, 2, sum(lengths), 4)
    results = []
    for least, groups in ((2**40, 1), (0, 4)):
        monkeypatch.setattr(attention, "ENOUGH_WORK", least)
        assert len(attention.groups_of_similar_length(lengths, 8)) == groups
        parts = [part.clone().requires_grad_() for part in (query, key, value)]
        # a copy, because the layout of a micro-batch is kept
        given_ = {"documents": Documents(documents.ends.clone(), 23), "queries": queries, "sliding_window": window}
        out, _ = attention.padded_attention(None, *parts, None, **given_)
        out.square().sum().backward()
        results.append([out, *(part.grad for part in parts)])
    for found, expected in zip(*results, strict=True):
        assert torch.allclose(found, expected, atol=1e-5)


def test_dropout_of_attention_acts_in_packed_attention():
    model = tiny("bert", attention_probs_dropout_prob=0.5).train()
    use_packed_attention(model, CPU, "no")
    batch = Packing()(Rows(np.array([9, 4, 2]), np.arange(5, 20)))
    del batch["attention_mask"]  # the model has no head that gets rows
    assert not torch.allclose(model(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize(
    ("device", "generation", "precision", "width", "why_not"),
    [
        ("cuda", (9, 0), "bf16", 16, ""),
        ("cuda", (8, 0), "fp16", 256, ""),
        ("cuda", (9, 0), "no", 16, "full precision"),
        ("cpu", (9, 0), "bf16", 16, "no GPU"),
        ("cuda", (9, 0), "bf16", 264, "heads of width 264, not a multiple of 8 up to 256"),
        ("cuda", (9, 0), "bf16", 12, "heads of width 12, not a multiple of 8 up to 256"),
        ("cuda", (7, 5), "fp16", 16, "a GPU older than Ampere"),
    ],
)
def test_flash_attention_is_chosen_only_where_it_runs(monkeypatch, device, generation, precision, width, why_not):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: generation)
    model = tiny("bert", hidden_size=2 * width)
    note = use_packed_attention(model, torch.device(device), precision)
    assert model.config._attn_implementation == ("packed_padded" if why_not else "packed_varlen")
    padded = f"over documents padded to the longest of their group ({why_not})"
    assert note == f"packed without padding, attention {padded if why_not else 'by FlashAttention'}"


def test_flash_attention_gets_the_ends_of_documents_the_dropout_and_the_window(monkeypatch):
    """Of one dtype, also after rotary positions in another. A stand-in records them: the kernel runs only on GPUs."""
    calls = []

    def stand_in(q, k, v, ends, _, longest, __, *rest, scale, **window):
        calls.append(({q.dtype, k.dtype, v.dtype}, q.shape, ends.tolist(), longest, *rest, scale, *window.values()))
        return (v,)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", stand_in)
    value, rotated = (torch.arange(24, dtype=dtype).view(1, 2, 4, 3) for dtype in (torch.float32, torch.float64))
    ends = torch.tensor([0, 3, 4], dtype=torch.int32)
    given = {"documents": Documents(ends, 3), "scaling": 0.5, "dropout": 0.1}
    for window in (None, 9):
        out, _ = attention.flash_attention(None, rotated, rotated, value, None, **given, sliding_window=window)
        assert torch.equal(out, value.transpose(1, 2))
    same = {torch.float32}, (4, 2, 3), [0, 3, 4], 3, 0.1, False, False, 0.5
    assert calls == [(*same, None, None), (*same, 8, 8)]


def test_flash_attention_compiles_to_one_kernel_for_each_pass():
    """Fake tensors have shapes only, so this needs no GPU."""
    kernels = []

    def compiler(graph, _):
        found = [node.target for node in graph.graph.nodes if "flash_attention" in str(node.target)]
        kernels.append([str(target).split(".")[1] for target in found])
        return make_boxed_func(graph)

    with FakeTensorMode(shape_env=ShapeEnv()):
        parts = [torch.zeros(1, 4, 20, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        ends = torch.tensor([0, 12, 20], dtype=torch.int32)

        def attend(query, key, value, ends, longest):
            given = {"documents": Documents(ends, longest), "dropout": 0.1}
            return attention.flash_attention(None, query, key, value, None, **given)[0].float().sum()

        partition = min_cut_rematerialization_partition  # that of torch.compile
        aot_function(attend, compiler, compiler, partition, dynamic=True)(*parts, ends, 12).backward()
        assert [part.grad.shape for part in parts] == [part.shape for part in parts]
    assert kernels == [["_flash_attention_forward"], ["_flash_attention_backward"]]


@pytest.mark.parametrize(
    ("kind", "packed"),  # an ESM multiplies its embeddings by an attention mask, which it gets in padded rows only
    [("bert", True), ("eurobert", True), ("esm", True), ("esm 2", False), ("mobilebert", False), ("deberta-v2", False)],
)
def test_documents_are_packed_only_if_they_do_not_see_each_other(kind, packed):
    """EuroBERT shares keys among heads; tokens of a MobileBERT see their neighbours, those of an ESM-2 all masks."""
    more = {"token_dropout": kind == "esm 2", "mask_token_id": 4, "intra_bottleneck_size": 32}
    model = tiny(kind.split()[0], num_key_value_heads=1, head_dim=16, **more)
    assert packing_is_exact(model) == packed
    assert model.config._attn_implementation in ("sdpa", "eager")
    data = [np.arange(5, 25), np.arange(5, 9)]
    config = SimpleNamespace(packing=True, mixed_precision="no", activation_dtype=None, max_length=60)
    collate, note = pack_or_pad(model, data, SimpleNamespace(pad_token_id=PAD), SimpleNamespace(device=CPU), config)
    assert collate.packed == packed
    assert ("packed without padding" in note) == packed
    assert (f"one text per row, because a {type(model).__name__} cannot be packed exactly" in note) == (not packed)
