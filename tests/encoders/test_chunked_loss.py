"""--chunked_loss gives the loss, gradients and scores of the whole logits, and never holds them all."""

import copy

import pytest
import runs
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForMaskedLM

from shared.encoders import chunked_loss
from shared.encoders.chunked_loss import Losses, cross_entropy, use_chunked_loss
from shared.encoders.masked_head import predict_only_masked
from shared.errors import UserError
from shared.extras.flops import FlopCounter
from shared.options.data_options import ModelOptions
from shared.processes import starting
from shared.speed.activations import use_activation_dtype

KINDS = ("bert", "roberta", "electra", "distilbert", "modernbert")
CLASSES, WIDTH, CHUNK = 320, 32, 7  # the last chunk is shorter: 7 does not divide the 30 masked tokens


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "LOGITS_OF_CHUNK", {"cpu": CHUNK * CLASSES})


def tiny(kind, **more):
    names = {"dim": WIDTH, "hidden_dim": 64, "n_layers": 2, "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0}
    if kind != "distilbert":
        names = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind in ("bert", "roberta", "electra"):
        names |= {"embedding_size": 16} if kind == "electra" else {}
        names |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    known = {"vocab_size": CLASSES, "pad_token_id": 0, "max_position_embeddings": 64, "initializer_range": 0.2}
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(AutoConfig.for_model(kind, **{**known, **names, **more})).train()
    with torch.no_grad():
        for p in model.parameters():  # biases begin at 0, where a wrong one would not be seen
            p.add_(0.02 * torch.randn(p.shape))
    predict_only_masked(model)
    return model


def batch(masked=30):
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(5, CLASSES - 20, (4, 25), generator=random)  # the last rows of the vocabulary are padding
    places = torch.randperm(100, generator=random)[:masked].sort().values
    return {"input_ids": ids, "masked": places}, ids.flatten()[places]


def whole(model, inputs, labels):
    return F.cross_entropy(model(**inputs).logits.float(), labels, reduction="sum")


def gradients_of(model, loss):
    model.zero_grad()
    (loss / 13).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_whole_logits(kind):
    model, (inputs, labels) = tiny(kind), batch()
    chunked = tiny(kind)
    use_chunked_loss(chunked)
    expected, found = whole(model, inputs, labels), chunked(**inputs, labels=labels)
    assert found.total.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.hits is None
    of_whole, of_chunks = gradients_of(model, expected), gradients_of(chunked, found.total)
    assert set(of_whole) == set(of_chunks) == {name for name, _ in model.named_parameters()}
    largest = max(gradient.abs().max() for gradient in of_whole.values())
    for name, gradient in of_whole.items():
        assert (of_chunks[name] - gradient).abs().max() <= 1e-6 * largest, name
    assert set(chunked.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_each_loss_and_hit_is_that_of_its_logits(kind):
    model, (inputs, labels) = tiny(kind).eval(), batch()
    use_chunked_loss(model)
    with torch.no_grad():
        logits, found = model(**inputs).logits, model(**inputs, labels=labels)
        _, easy, hits = model(**inputs, labels=logits.argmax(1))
    assert torch.allclose(found.each, F.cross_entropy(logits, labels, reduction="none"), rtol=1e-6)
    assert torch.equal(found.hits, logits.argmax(1) == labels)
    assert hits.all()
    assert (easy <= found.each + 1e-6).all()
    assert found.total.item() == pytest.approx(found.each.sum().item())


def test_frozen_weights_get_no_gradient_and_the_rest_the_same():
    model, (inputs, labels) = tiny("bert"), batch()
    chunked = tiny("bert")
    use_chunked_loss(chunked)
    for each in (model, chunked):
        each.get_output_embeddings().requires_grad_(False)  # tied: the embedding, too
    of_whole = gradients_of(model, whole(model, inputs, labels))
    of_chunks = gradients_of(chunked, chunked(**inputs, labels=labels).total)
    assert set(of_whole) == set(of_chunks)
    assert not any("word_embeddings" in name or "decoder" in name for name in of_chunks)
    for name, gradient in of_whole.items():
        assert torch.allclose(of_chunks[name], gradient, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("how", ["autocast", "activations"])
def test_in_bf16_the_loss_is_float32_and_close_to_that_of_the_whole_logits(how):
    """Both round the logits to bf16; the gradients differ by the rounding of products."""
    found = []
    for use in (lambda _: None, use_chunked_loss):
        model, (inputs, labels) = tiny("modernbert"), batch()
        use(model)
        if how == "activations":
            use_activation_dtype(ModelOptions(activation_dtype="bf16"), model)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            loss = model(**inputs, labels=labels).total if found else whole(model, inputs, labels)
        assert loss.dtype == torch.float32
        gradients = gradients_of(model, loss)
        assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
        found.append((loss.item(), torch.cat([gradient.flatten() for gradient in gradients.values()])))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert runs.distance(found[1][1], found[0][1]) < 0.01


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it since 2.13")
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_what_torch_computes_by_linear_cross_entropy(bias):
    torch.manual_seed(0)
    layer, hidden, targets = nn.Linear(WIDTH, CLASSES, bias=bias), torch.randn(30, WIDTH), torch.arange(30)
    found = []
    for compute in (
        lambda h: cross_entropy(h, layer.weight, layer.bias, targets).total,
        lambda h: F.linear_cross_entropy(
            h,
            layer.weight,
            targets,
            linear_bias=layer.bias,
            reduction="sum",
            options=nn.LinearCrossEntropyOptions(batch_chunk_size=CHUNK, chunking_method=None),
        ),
    ):
        layer.zero_grad()
        leaf = hidden.clone().requires_grad_()
        loss = compute(leaf)
        loss.backward()
        found.append([loss.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())])
    for ours, torchs in zip(*found, strict=True):
        assert torch.allclose(ours, torchs, rtol=1e-5, atol=1e-6)


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operation makes, apart from views that take none."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        sizes = [t.untyped_storage().nbytes() // t.itemsize for t in tree_leaves(made) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return made


@pytest.mark.parametrize("training", [True, False])
def test_the_whole_logits_are_never_in_memory(training):
    hidden, targets = torch.randn(400, WIDTH), torch.arange(400) % CLASSES
    layer = nn.Linear(WIDTH, CLASSES)
    with torch.set_grad_enabled(training), Largest() as largest:
        losses = cross_entropy(hidden.requires_grad_(training), layer.weight, layer.bias, targets)
        if training:
            losses.total.backward()
    assert largest.elements == max(layer.weight.numel(), hidden.numel())
    with Largest() as largest:
        F.cross_entropy(layer(hidden), targets)
    assert largest.elements == 400 * CLASSES, "this test sees the logits where they are made"


def test_operations_are_counted_as_without_it():
    counted = []
    for use in (lambda _: None, use_chunked_loss):
        model, (inputs, labels) = tiny("bert"), batch()
        use(model)
        counter = FlopCounter(model)
        model(**inputs, **({"labels": labels} if counted else {}))
        counted.append(counter.stop())
    assert counted[0] == counted[1] > 2 * 30 * CLASSES * WIDTH


def test_a_model_whose_logits_no_linear_layer_makes_is_refused():
    with pytest.raises(UserError, match="--chunked_loss: a Linear has no linear layer that makes its logits: leave it"):
        use_chunked_loss(nn.Linear(2, 2))


@pytest.mark.parametrize("change", ["scaled", "another"])
def test_a_model_that_does_more_than_its_last_layer_is_refused(change):
    model = tiny("bert")
    if change == "scaled":  # what comes behind the layer would be lost
        model.cls.register_forward_hook(lambda *arguments: arguments[-1] * 2)
    else:  # and so would a layer that transformers does not name
        model.cls.predictions.decoder = copy.deepcopy(model.cls.predictions.decoder)
        model.get_output_embeddings = lambda: nn.Linear(WIDTH, CLASSES)
    with pytest.raises(UserError, match=r"^--chunked_loss .*BertForMaskedLM.*: leave it out$"):
        use_chunked_loss(model)


@pytest.mark.usefixtures("launched_by_nobody")
def test_fp16_is_refused():
    config = runs.load_recipe("mlm").Config(mixed_precision="fp16", chunked_loss=True)
    with pytest.raises(UserError, match=r"--chunked_loss does not work with mixed_precision fp16.*use"):
        starting.check_environment(config, on_cpu=False)


def test_a_call_returns_losses_only_where_labels_are_given():
    model, (inputs, labels) = tiny("bert"), batch()
    use_chunked_loss(model)
    assert isinstance(model(**inputs, labels=labels), Losses)
    assert model(**inputs).logits.shape == (30, CLASSES)
