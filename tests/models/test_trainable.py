"""--freeze keeps weights, and --layer_lr_decay trains lower layers at smaller rates."""

import pytest
from families import MASKED_LM, small
from torch import nn

from shared.errors import UserError
from shared.models.optimizers import make_optimizer
from shared.models.trainable import Frozen
from shared.optimization.optimizers import set_learning_rate
from shared.options.data_options import ModelOptions


def new():
    return small("bert", MASKED_LM)  # of three layers


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["embeddings"], lambda name: ".embeddings." in name),
        (["layer.0"], lambda name: ".layer.0." in name),
        (["layer.[0-1]", "*.bias"], lambda name: ".layer.0." in name or ".layer.1." in name or name.endswith("bias")),
        (["bert"], lambda name: name.startswith("bert.")),
        (["decoder"], lambda name: ".word_embeddings." in name or name == "cls.predictions.bias"),  # both are tied
    ],
)
def test_a_pattern_freezes_the_modules_and_parameters_that_it_names(patterns, expected, capsys):
    model = new()
    Frozen(patterns).given(None, model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if expected(name)} != set()
    count = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert f"--freeze {' '.join(patterns)}: {count:,} of " in capsys.readouterr().err


def test_a_pattern_without_a_parameter_and_a_model_that_is_frozen_as_a_whole_are_refused():
    with pytest.raises(UserError, match=r"--freeze encoder\.layers: no parameter of the BertForMaskedLM has such a"):
        Frozen(["encoder.layers"]).given(None, new())
    with pytest.raises(UserError, match=r"--freeze bert cls freezes all parameters: leave some to train"):
        Frozen(["bert", "cls"]).given(None, new())


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("kind", ["bert", "modernbert", "electra", "distilbert", "gpt2", "vit", "xlm"])
def test_the_rate_falls_from_the_head_to_the_embeddings(kind, optim):
    model = small(kind)
    config = ModelOptions(learning_rate=0.5, weight_decay=0.1, layer_lr_decay=0.5, optim=optim)
    optimizer = make_optimizer(model, config)
    set_learning_rate(optimizer, 1.0)
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert {group["lr"] for group in group_of.values()} == {1.0, 0.5, 0.25, 0.125, 0.0625}
    for parameter, weights in model.named_parameters():
        layer = next((int(word) for word in parameter.split(".") if word.isdigit()), None)
        below = "embed" in parameter or any(name in parameter for name in (".wte.", ".wpe.", "_emb."))
        expected = 0.5**4 if below else 1.0 if layer is None else 0.5 ** (3 - layer)
        group = group_of[id(weights)]
        assert (group["lr"], group["weight_decay"]) == (expected, 0.1 if weights.ndim >= 2 else 0), parameter


def test_what_lies_between_two_layers_has_the_rate_of_the_lower_one_and_two_chains_of_layers_follow_each_other():
    chains = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    model = nn.Sequential(chains[0], nn.LayerNorm(2), chains[1], nn.LayerNorm(2))
    groups = make_optimizer(model, ModelOptions(layer_lr_decay=0.5)).param_groups
    rates = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert [rates[id(p)] for p in model.parameters()][::2] == [0.0625, 0.125, 0.125, 0.25, 0.5, 1.0]


def test_without_a_decay_there_are_the_usual_groups_and_without_layers_no_decay():
    groups = make_optimizer(new(), ModelOptions()).param_groups
    assert [group.get("lr_scale") for group in groups] == [None, None]
    with pytest.raises(UserError, match=r"--layer_lr_decay 0.9: a Linear has no list of layers"):
        make_optimizer(nn.Linear(2, 2), ModelOptions(layer_lr_decay=0.9))
