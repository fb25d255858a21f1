"""--fixed_shapes: filled micro-batches have the losses and gradients of unfilled ones, and few shapes to compile."""

import copy
import dataclasses
from types import SimpleNamespace

import families
import numpy as np
import pytest
import runs
import torch
from accelerate import Accelerator
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from shared.compat import of_torch
from shared.config import options
from shared.config.options import Options
from shared.encoders.masked_head import predict_only_masked
from shared.encoders.packed_texts import PackedTexts, pack_or_pad_texts, unpack_before_head
from shared.encoders.packing import Packing, pack_or_pad, use_packed_attention
from shared.encoders.text_models import adapt_to_device
from shared.errors import UserError
from shared.models.layers import is_short
from shared.plan.batches import Plan
from shared.plan.cutting import fill_in_order
from shared.plan.fixed_shapes import BUCKETS, FixedShapes
from shared.speed import compiling
from shared.speed.compiling import compile_layers

CPU = torch.device("cpu")
NO_DROPOUT = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
NO_DROPOUT |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout", "classifier_dropout_prob"), 0.0)
WINDOW = {"local_attention": 16, "global_attn_every_n_layers": 2}
SHAPES = FixedShapes.of_sizes(160, 8, 48)
LENGTHS = ((48, 37, 37, 12, 3, 1), (1,), (48, 48, 48, 16))  # the last leaves nothing to fill


def tiny(auto, family, **more):
    own = WINDOW if family == "ModernBERT" else {}
    return families.tiny(auto, family, 60, pad_token_id=0, num_labels=3, **NO_DROPOUT | own | more).double().train()


def as_in_the_recipe(model):
    """The model after `adapt_to_device` on a CPU."""
    accelerator = SimpleNamespace(device=CPU, num_processes=1, is_fsdp2=False, mixed_precision="no", print=print)
    return adapt_to_device(accelerator, Options(output_dir="unused"), model)


def loss_and_gradients(model, batch, target):
    """The loss, and all gradients as one vector; `target` has a label for each row of logits."""
    model.zero_grad()
    loss = F.cross_entropy(model(**batch).logits, target, reduction="sum")
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach()[None], torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def documents(lengths, seed=0):
    """(tokens, lengths, masked, labels), as `MaskedDocuments.read_micro_batch` gives them."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(5, 59, sum(lengths))
    masked = np.sort(generator.choice(len(tokens), max(1, len(tokens) // 3), replace=False))
    return tokens, np.array(lengths), masked, generator.integers(5, 59, len(masked))


def items(model, lengths):
    """Items as of `TokenizedText`."""
    random, found = np.random.default_rng(0), []
    for length in lengths:
        types = (np.arange(length) > length // 2).astype(np.uint8)
        ids = random.integers(5, 59, length).astype(np.uint16)
        found.append((ids, types if getattr(model.config, "type_vocab_size", 0) > 1 else None, length % 3))
    return found


def check_shapes(batch):
    assert batch["input_ids"].shape == batch["position_ids"].shape == (1, SHAPES.tokens)
    assert batch["cu_seq_lens_q"].shape == (SHAPES.documents + 1,)
    assert batch["cu_seq_lens_q"][-1] == SHAPES.tokens
    assert batch["max_length_q"] in (12, 24, 36, 48)
    assert batch["cu_seq_lens_q"].diff().max() <= batch["max_length_q"]


@pytest.mark.parametrize("family", ["BERT", "RoBERTa", "ModernBERT"])
def test_filled_documents_have_the_loss_and_gradients_of_unfilled_ones(family):
    model = tiny(AutoModelForMaskedLM, family)
    predict_only_masked(model)
    use_packed_attention(model, CPU, "no")
    plain, filled = (Packing.for_model(model.config, shapes) for shapes in (None, SHAPES))
    for lengths in LENGTHS:
        batches = [collate(documents(lengths)) for collate in (plain, filled)]
        check_shapes(batches[1])
        found = [loss_and_gradients(model, batch, batch.pop("labels")) for batch in batches]
        for one, other in zip(*found, strict=True):
            assert runs.distance(other, one) < 1e-12


HEADS = {"BERT": True, "DistilBERT": True, "RoBERTa": True, "ALBERT": False, "ModernBERT": False}


@pytest.mark.parametrize("family", HEADS)
def test_filled_texts_have_the_logits_and_gradients_of_unfilled_ones(family):
    more = {"classifier_pooling": "mean"} if family == "ModernBERT" else {}
    whole = tiny(AutoModelForSequenceClassification, family, **more)
    plain, model = (as_in_the_recipe(copy.deepcopy(whole)) for _ in range(2))
    assert is_short(model) == HEADS[family]
    assert unpack_before_head(plain)
    assert unpack_before_head(model, filled=True)
    collates = [PackedTexts.for_model(model.config, shapes) for shapes in (None, SHAPES)]
    for each in (plain, model):
        use_packed_attention(each, CPU, "no")
    for lengths in LENGTHS:
        batches = [collate(items(model, lengths)) for collate in collates]
        check_shapes(batches[1])
        pairs = zip((plain, model), batches, strict=True)
        found = [loss_and_gradients(each, batch, batch.pop("labels")) for each, batch in pairs]
        for one, other in zip(*found, strict=True):
            assert runs.distance(other, one) < 1e-12


def test_what_a_kernel_leaves_in_rows_of_no_document_reaches_neither_logits_nor_gradients(monkeypatch):
    """The kernel runs on GPUs only. This stand-in leaves NaN in rows and gradients of no document."""
    from torch.nn.attention import varlen

    def stand_in(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size):
        def spoil(gradient):
            return gradient.index_fill(0, torch.arange(int(ends_q[-1]), len(q)), torch.nan)

        q.register_hook(spoil)
        out = []
        for i in range(len(ends_q) - 1):
            one, other = slice(*ends_q[i : i + 2].tolist()), slice(*ends_k[i : i + 2].tolist())
            assert one.stop - one.start <= longest_q
            assert other.stop - other.start <= longest_k
            parts = (part.transpose(0, 1) for part in (q[one], k[other], v[other]))  # [heads, tokens, width]
            out.append(F.scaled_dot_product_attention(*parts, scale=scale).transpose(0, 1))
        return torch.cat([*out, q.new_full((len(q) - int(ends_q[-1]), *q.shape[1:]), torch.nan)])

    monkeypatch.setattr(varlen, "varlen_attn", stand_in)
    model = as_in_the_recipe(tiny(AutoModelForSequenceClassification, "BERT"))
    assert unpack_before_head(model, filled=True)
    found = []
    for name, shapes in (("packed_padded", None), ("packed_varlen", SHAPES)):
        model.set_attn_implementation(name)
        batch = PackedTexts.for_model(model.config, shapes)(items(model, LENGTHS[0]))
        found.append(loss_and_gradients(model, batch, batch.pop("labels")))
    for one, other in zip(*found, strict=True):
        assert runs.distance(other, one) < 1e-12


@pytest.mark.docs  # it takes long; the test of a run below counts graphs, too
def test_layers_compile_once_for_each_bucket_of_lengths(monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "eager")  # traces as any other does
    torch._dynamo.reset()
    plain = tiny(AutoModelForMaskedLM, "BERT")
    predict_only_masked(plain)
    use_packed_attention(plain, CPU, "no")
    model = tiny(AutoModelForMaskedLM, "BERT")
    predict_only_masked(model)
    use_packed_attention(model, CPU, "no")
    compile_layers(Accelerator(cpu=True), Options(torch_compile=True), model, fixed_shapes=True)
    collate, generator = Packing.for_model(model.config, SHAPES), np.random.default_rng(0)
    before, buckets = of_torch.compiled_graphs(), set()
    for seed, longest in enumerate((48, 20, 5, 30, 37, 13, 12, 36)):
        batch = collate(documents([longest, *generator.integers(1, longest + 1, 2)], seed))
        buckets.add(batch["max_length_q"])
        labels = batch.pop("labels")
        with torch.no_grad():
            losses = [F.cross_entropy(each(**batch).logits, labels).item() for each in (plain, model)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        assert of_torch.compiled_graphs() - before == len(buckets)
    assert len(buckets) == BUCKETS


@pytest.mark.parametrize("max_samples", [None, 5, 40])
def test_every_micro_batch_of_a_plan_can_be_filled_in_training_and_evaluation(max_samples):
    lengths = np.minimum(np.random.default_rng(0).geometric(0.1, 300), 50)
    budget = {"max_tokens": 97, "max_samples": max_samples}
    plan = Plan(lengths=lengths, packed=True, fixed_shapes=True, seed=0, global_batch_size=24, num_epochs=1, **budget)
    rows = min(24, max_samples or 24)
    shapes = FixedShapes.of_sizes(97, rows, 50)
    pieces = [piece for step in range(plan.total_steps) for piece in plan.cut(step)]
    for piece in [*pieces, *plan.evaluation(lengths)]:
        filling, ends, longest = shapes.fill(lengths[piece.samples])
        assert len(ends) == shapes.documents + 1
        assert ends[-1] == lengths[piece.samples].sum() + filling.sum() == 97
        assert (np.diff(ends) >= 0).all()
        assert lengths[piece.samples].max() <= longest <= 50
        assert filling.max(initial=0) <= longest
        assert longest in (13, 26, 39, 50)
    real = -np.sort(-lengths[plan.global_batch(0)[0]])
    assert len(plan.cut(0)) == len(fill_in_order(real.tolist(), 97, rows, packed=True)), "no more than needed"
    assert not plan.refined(0)
    assert plan.filling(0) == pytest.approx(1 - lengths[plan.global_batch(0)[0]].sum() / (97 * len(plan.cut(0))))


def test_a_tensor_of_tokens_never_has_the_length_of_one_of_documents():
    assert all(FixedShapes.of_sizes(96, rows, 48).documents != 96 for rows in range(1, 200))


COMPILED = ("--torch_compile", "--fixed_shapes")


@pytest.mark.parametrize(
    ("recipe", "flags", "message"),
    [
        ("mlm", ["--fixed_shapes"], "--fixed_shapes True has no effect without --torch_compile"),
        ("mlm", [*COMPILED, "--no_packing"], "--fixed_shapes True has no effect without --packing"),
        ("nlp", [*COMPILED], "--fixed_shapes True has no effect without --packing"),
        ("mlm", [*COMPILED, "--max_tokens_per_micro_batch", "None"], "without --max_tokens_per_micro_batch"),
    ],
)
def test_the_flag_is_refused_where_it_has_no_effect(recipe, flags, message):
    with pytest.raises(UserError, match=message):
        options.parse(runs.load_recipe(recipe).Config, flags)


def test_it_is_refused_with_a_searched_budget_and_for_a_model_that_cannot_be_packed():
    config = options.parse(runs.load_recipe("mlm").Config, [*COMPILED])
    accelerator, tokenizer = SimpleNamespace(device=CPU), SimpleNamespace(pad_token_id=0)
    searched = dataclasses.replace(config, auto_micro_batch=True)
    with pytest.raises(UserError, match=r"^--fixed_shapes does not work with --auto_micro_batch"):
        pack_or_pad(tiny(AutoModelForMaskedLM, "BERT"), [np.arange(5, 25)], tokenizer, accelerator, searched)
    model = tiny(AutoModelForMaskedLM, "MobileBERT")
    with pytest.raises(UserError, match=r"^--fixed_shapes has no effect, because a MobileBertForMaskedLM cannot be"):
        pack_or_pad(model, [np.arange(5, 25), np.arange(5, 9)], tokenizer, accelerator, config)
    model = tiny(AutoModelForSequenceClassification, "MobileBERT")
    with pytest.raises(UserError, match=r"^--fixed_shapes has no effect, because a MobileBertForSequenceClassif"):
        pack_or_pad_texts(model, [], [], tokenizer, accelerator, config)


@pytest.mark.usefixtures("one_cpu_process_without_a_picture")
@pytest.mark.parametrize("recipe", ["mlm", pytest.param("nlp", marks=pytest.mark.docs)])
def test_a_run_with_fixed_shapes_equals_one_without_and_compiles_few_graphs(
    recipe, texts, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(compiling, "BACKEND", "eager")
    torch._dynamo.reset()
    module, before = runs.load_recipe(recipe), of_torch.compiled_graphs()
    flags = [*map(str, texts), *runs.TINY, "--packing", "--logging_steps", "1", "--model_type", "bert"]
    scores = {}
    for name, more in {"plain": [], "filled": COMPILED}.items():
        scores[name] = module.main(options.parse(module.Config, [*flags, *more, "--output_dir", str(tmp_path / name)]))
    assert runs.distance(runs.weights(tmp_path / "filled"), runs.weights(tmp_path / "plain")) < 1e-5
    lines, filled = (runs.training_lines(tmp_path / name) for name in ("plain", "filled"))
    assert [line["loss"] for line in filled] == pytest.approx([line["loss"] for line in lines], rel=1e-5)
    assert [line["padding"] for line in lines] == [0] * 8
    assert min(line["padding"] for line in filled) > 0, "filling is reported as padding"
    assert scores["filled"] == pytest.approx(scores["plain"], rel=1e-5)
    layers = 2 if recipe == "nlp" else 1  # the last layer of a classifier computes the first token only
    assert of_torch.compiled_graphs() - before <= layers * 2 * BUCKETS, "training and evaluation for each bucket"
    said = capfd.readouterr().out
    assert "filled up to 96 tokens in 20 documents" in said
    assert "of the tokens of a step; --max_tokens_per_micro_batch and" in said
