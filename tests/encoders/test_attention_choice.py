"""--attention: all kernels give the same results, the fastest one is chosen once, and a resumed run takes the same.

The kernels of GPUs do not run here: stand-ins test when they are offered and what they are called with.
"""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import families
import numpy as np
import pytest
import runs
import torch
from torch.nn.attention import SDPBackend
from transformers import AutoModelForMaskedLM

from shared.config import options
from shared.encoders import attention_choice
from shared.encoders.attention_choice import (
    KERNELS,
    check,
    cudnn_attention,
    fastest,
    layers_by_window,
    set_attention,
    why_not,
)
from shared.encoders.packing import Packing, padded_attention, use_packed_attention
from shared.errors import UserError

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WINDOW = {"local_attention": 16, "global_attn_every_n_layers": 2}
LENGTHS = ((40, 23, 23, 9, 2, 1), (20, 20, 20), (60,))


def tiny(family, **more):
    own = WINDOW if family == "ModernBERT" else {}
    return families.tiny(AutoModelForMaskedLM, family, 60, **NO_DROPOUT | own | more).train()


def logits_and_gradients(model, lengths):
    model.zero_grad()
    tokens = np.random.default_rng(0).integers(5, 59, sum(lengths))
    logits = model(**Packing.for_model(model.config).arguments(tokens, np.array(lengths))).logits
    logits.square().sum().backward()
    return logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", ["BERT", "ModernBERT"])
def test_attention_by_length_gives_the_logits_and_gradients_of_padded_attention(family):
    model = tiny(family)
    for lengths in LENGTHS:
        use_packed_attention(model, CPU, "no")
        expected = logits_and_gradients(model, lengths)
        set_attention(model, ("documents",))
        for one, other in zip(expected, logits_and_gradients(model, lengths), strict=True):
            assert runs.distance(other, one) < 1e-6


def inputs(lengths_k, lengths_q=None, heads=4, shared=2):
    """query, key, value and the boundaries of documents with these numbers of tokens and of queries."""
    lengths_q, generator = lengths_q or lengths_k, torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, count, sum(lengths), 8, generator=generator)
        for count, lengths in ((heads, lengths_q), (shared, lengths_k), (shared, lengths_k))
    )
    given = {}
    for name, lengths in (("q", lengths_q), ("k", lengths_k)):
        given[f"cu_seq_lens_{name}"] = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
        given[f"max_length_{name}"] = max(lengths)
    return (None, query, key, value, None), given


@pytest.mark.parametrize("window", [None, 5])
def test_attention_by_length_shares_keys_among_heads_and_takes_any_number_of_queries_per_document(window):
    fewer = [((9, 9, 4, 1), queries) for queries in ((1, 1, 1, 1), (3, 3, 0, 1), (0, 9, 2, 0))]
    cases = [((9, 9, 4, 1), None), *(fewer if window is None else [])]
    for lengths in cases:
        arrays, given = inputs(*lengths)
        expected, _ = padded_attention(*arrays, **given, sliding_window=window)
        found, _ = KERNELS["documents"](*arrays, **given, sliding_window=window)
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, atol=1e-6)


def test_cudnn_gets_documents_of_equal_length_and_varlen_all_others(monkeypatch):
    backends, others = [], []
    monkeypatch.setattr(attention_choice, "sdpa_kernel", lambda found, **_: backends.append(found[0]) or nullcontext())
    monkeypatch.setattr(
        attention_choice, "varlen_attention", lambda *arrays, **given: others.append(given) or (arrays[3], None)
    )
    for lengths, window in (((6, 6, 6), None), ((6, 6, 6), 6)):
        arrays, given = inputs(lengths)
        found, _ = cudnn_attention(*arrays, **given, sliding_window=window)
        assert torch.allclose(found, padded_attention(*arrays, **given, sliding_window=window)[0], atol=1e-6)
    assert backends == [SDPBackend.CUDNN_ATTENTION] * 2
    assert others == []
    for lengths, window in (((6, 6, 5), None), ((6, 6, 6), 5)):
        arrays, given = inputs(lengths)
        cudnn_attention(*arrays, **given, sliding_window=window)
    arrays, given = inputs((6, 6, 6), (1, 1, 1))
    cudnn_attention(*arrays, **given)
    assert [each["sliding_window"] for each in others] == [None, 5, None]
    assert all(each["max_length_k"] == 6 for each in others)
    assert len(backends) == 2


def test_another_kernel_computes_only_where_tracing_of_a_compiled_layer_rejects_cudnn():
    torch._dynamo.reset()
    compiled = torch.compile(cudnn_attention, backend="aot_eager", fullgraph=True)
    arrays, given = inputs((6, 6, 6))
    with pytest.raises(RuntimeError):
        cudnn_attention(*arrays, **given)
    with torch.no_grad():
        found, _ = compiled(*arrays, **given)
    assert torch.allclose(found, padded_attention(*arrays, **given)[0], atol=1e-6)


@pytest.mark.parametrize(
    ("found", "layers", "names"),
    [
        ({None: {"padded": 2.0, "documents": 1.0}}, {None: 2}, ("documents",)),
        ({None: {"padded": 1.04, "documents": 1.0}}, {None: 2}, ("padded",)),
        ({None: {"padded": 2.0, "documents": "differs"}}, {None: 2}, ("padded",)),
        (
            {5: {"varlen": 1.0, "padded": 3.0, "flash3": 1.2}, None: {"varlen": 2.0, "padded": 1.0, "flash3": 1.2}},
            {5: 2, None: 1},
            ("padded", "varlen"),
        ),
        # FlashAttention-3 is slower in local layers, and still the best of all that can be used together.
        (
            {5: {"varlen": 1.0, "padded": 3.0, "flash3": 1.2}, None: {"varlen": 9.0, "padded": 9.0, "flash3": 1.0}},
            {5: 2, None: 1},
            ("flash3",),
        ),
        (
            {5: {"varlen": 1.0, "padded": 3.0, "flash3": 1.2}, None: {"varlen": 2.0, "padded": 9.0, "flash3": 1.9}},
            {5: 2, None: 1},
            ("varlen",),
        ),
        ({None: {"varlen": 2.0, "padded": "differs", "cudnn": 1.0}}, {None: 2}, ("cudnn",)),
    ],
)
def test_the_kernels_with_the_least_time_over_all_layers_are_chosen(found, layers, names):
    assert fastest(found, layers, next(iter(found[None]))) == names


def test_kernels_are_offered_only_where_they_work(monkeypatch):
    model, config = tiny("BERT", hidden_size=128, num_attention_heads=2).config, SimpleNamespace()
    generation, installed = [(9, 0)], [None]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: generation[0])
    monkeypatch.setattr(attention_choice.importlib.util, "find_spec", lambda name: installed[0])

    def offered(device, precision="bf16", **flags):
        vars(config).update({"torch_compile": False, "deterministic": False} | flags)
        return {name: reason for name in KERNELS if (reason := why_not(name, config, model, device, precision))}

    no_gpu = dict.fromkeys(("varlen", "flash3", "cudnn"), "no GPU")
    assert offered(CPU) == no_gpu
    assert offered(CPU, torch_compile=True) == no_gpu | {"documents": "it cannot be compiled"}
    waits = {"documents": "it waits for the GPU"}
    assert offered(CUDA) == waits | {"flash3": "no package flash_attn_interface"}
    installed[0] = True
    assert offered(CUDA) == waits
    assert offered(CUDA, deterministic=True) == waits | {"cudnn": "it is not deterministic"}
    assert set(offered(CUDA, "no").values()) == {"it waits for the GPU", "full precision"}
    generation[0] = (8, 0)
    assert offered(CUDA) == waits | {"flash3": "it is for Hopper GPUs"}
    generation[0] = (9, 0)
    monkeypatch.setattr(torch.nn.attention, "list_flash_attention_impls", lambda: [])
    assert offered(CUDA) == waits | {"flash3": f"torch {torch.__version__} cannot use it"}


def test_flash_attention_3_is_active_only_in_a_run_that_uses_it(monkeypatch):
    active = [None]
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1])
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: active.append(None))
    model = tiny("ModernBERT")
    for names in (("padded",), ("flash3", "padded"), ("flash3",), ("varlen",)):
        set_attention(model, names)
        assert active[-1] == ("FA3" if "flash3" in names else None)
    set_attention(model, ("flash3",))
    use_packed_attention(model, CPU, "no")
    assert active == [None, "FA3", None, "FA3", None]


def test_global_and_local_layers_use_their_own_kernels(monkeypatch):
    model, calls = tiny("ModernBERT", num_hidden_layers=3), []
    assert layers_by_window(model) == {None: 2, 9: 1}
    assert layers_by_window(tiny("BERT")) == {None: 2}
    use_packed_attention(model, CPU, "no")
    expected = logits_and_gradients(model, LENGTHS[0])
    for name in ("padded", "documents"):
        kernel = KERNELS[name]
        monkeypatch.setitem(
            KERNELS,
            name,
            lambda *arrays, name=name, kernel=kernel, **given: (
                calls.append((name, given["sliding_window"])) or kernel(*arrays, **given)
            ),
        )
    set_attention(model, ("documents", "padded"))
    found = logits_and_gradients(model, LENGTHS[0])
    assert calls == [("documents", None), ("padded", 9), ("documents", None)]
    assert all(runs.distance(other, one) < 1e-6 for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("names", "packed", "message"),
    [
        (("padded",), False, "--attention padded has no effect, because a BertForMaskedLM cannot be packed"),
        (("padded", "documents"), True, "a BertForMaskedLM has no local layers, so give one name"),
        (("auto",), True, "--attention auto does not work with --auto_micro_batch"),
    ],
)
def test_names_without_effect_are_refused(names, packed, message):
    model = tiny("BERT")
    with pytest.raises(UserError, match=message):
        check(names, SimpleNamespace(auto_micro_batch=True), model, layers_by_window(model), packed)


@pytest.mark.parametrize("names", [("auto", "padded"), ("padded",) * 3, ("flash3", "varlen")])
def test_names_that_contradict_each_other_are_refused(names):
    model = tiny("ModernBERT")
    with pytest.raises(UserError, match=f"^--attention {' '.join(names)}: "):
        check(names, SimpleNamespace(auto_micro_batch=False), model, layers_by_window(model), True)


@pytest.fixture
def mlm(texts, monkeypatch):
    """Trains a ModernBERT with global and local layers; `times` has the seconds that each kernel takes."""
    recipe, times = runs.load_recipe("mlm"), {"padded": 1.0, "documents": 2.0}
    monkeypatch.setattr(attention_choice, "seconds", lambda name, _, window: times[name] * (1 + (window is None)))

    def train(output, *flags):
        words = [*texts, *runs.TINY, "--checkpointing_steps", 4, *flags, "--output_dir", output]
        recipe.main(options.parse(recipe.Config, list(map(str, words))))
        return options.load(output / "config.yaml")["attention"]

    return SimpleNamespace(train=train, times=times)


@pytest.mark.usefixtures("one_cpu_process_without_a_picture")
def test_the_choice_is_kept_in_the_config_and_a_resumed_run_takes_it_again(mlm, tmp_path, capfd):
    mlm.times["documents"] = 0.5
    assert mlm.train(tmp_path / "whole", "--attention", "auto") == ["documents"]
    said = capfd.readouterr().out
    assert re.search(
        r"attention +documents; global layers: padded 4000.00 ms, documents 2000.00 ms; local layers", said
    )
    mlm.times["documents"] = 2.0  # now another choice would be made
    middle = ["--resume_from_checkpoint", tmp_path / "whole/checkpoints/step_00000004"]
    assert mlm.train(tmp_path / "resumed", "--attention", "auto", *middle) == ["documents"]
    whole, resumed = ((tmp_path / name / "model/model.safetensors").read_bytes() for name in ("whole", "resumed"))
    assert whole == resumed
    with pytest.raises(UserError, match="--attention was documents, is None"):
        mlm.train(tmp_path / "usual", *middle)
    assert mlm.train(tmp_path / "anew", "--attention", "auto", "--max_train_steps", 1) == ["padded"]


@pytest.mark.usefixtures("one_cpu_process_without_a_picture")
def test_a_kernel_with_another_result_is_not_chosen_and_refused_by_name(mlm, tmp_path, monkeypatch):
    def wrong(*arrays, **given):
        out, _ = padded_attention(*arrays, **given)
        return 1.01 * out, None

    monkeypatch.setitem(KERNELS, "documents", wrong)
    mlm.times["documents"] = 0.5
    assert mlm.train(tmp_path / "auto", "--attention", "auto", "--max_train_steps", 1) == ["padded"]
    with pytest.raises(UserError, match=r"--attention documents cannot be used \(its result differs by more than"):
        mlm.train(tmp_path / "named", "--attention", "documents")
    with pytest.raises(UserError, match=r"--attention flash3 cannot be used \(no GPU\)"):
        mlm.train(tmp_path / "gpu", "--attention", "padded", "flash3")


def test_the_clock_counts_a_forward_and_a_backward_pass():
    """The real clock, whose figure decides nothing here."""
    arrays, given = inputs((9, 9, 4, 1), shared=4)
    tensors = [each.requires_grad_() for each in arrays[1:4]] + [torch.randn(1, 23, 4, 8)]
    found = attention_choice.outcomes(
        KERNELS, "padded", dict.fromkeys(KERNELS, ""), [attention_choice.Inputs(tensors, given)], None
    )
    assert found["padded"] > 0
    assert found["documents"] > 0
    assert all(isinstance(found[name], str) for name in ("varlen", "flash3", "cudnn")), "no GPU"
    assert tensors[0].grad is None
