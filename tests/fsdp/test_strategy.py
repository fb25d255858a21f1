"""The layers of a model that FSDP2 gathers as separate units."""

import os

import pytest
import runs
import torch
from families import MASKED_LM, small
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from shared.compat import of_accelerate_fsdp
from shared.fsdp.strategy import shard, units

MODELS = {
    "bert": (lambda: small("bert", MASKED_LM), ["BertLayer"] * 3),
    "modernbert": (lambda: small("modernbert", MASKED_LM), ["ModernBertEncoderLayer"] * 3),
    "resnet": (
        lambda: ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])),
        ["ResNetStage"] * 2,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_repeated_layer_is_a_unit_and_tied_weights_are_in_none(name):
    make, expected = MODELS[name]
    model = make()
    found = units(model)
    assert [type(layer).__name__ for layer in found] == expected
    inside = {id(p) for layer in found for p in layer.parameters()}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tied = [p for name, p in model.named_parameters(remove_duplicate=False) if "decoder" in name]
    assert len(names) > len(inside)
    assert not {id(p) for p in tied} & inside


def test_layers_that_share_a_parameter_have_none_or_have_no_forward_are_not_units_and_those_of_stages_are():
    shared = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    shared[0].weight = shared[1].weight
    assert units(nn.ModuleDict({"layers": shared})) == [shared[2]]
    assert units(nn.Sequential(nn.Tanh(), nn.Tanh())) == []
    assert units(nn.Linear(2, 2)) == []
    lists = nn.ModuleList(nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])]) for _ in range(2))
    assert units(nn.ModuleDict({"layers": lists})) == []
    stages = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Tanh()]) for _ in range(2))
    assert units(nn.ModuleDict({"stages": stages})) == [stages[0][0], stages[1][0]]


def test_a_layer_with_two_names_for_one_parameter_is_a_unit():
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    for block in blocks:
        block[1].weight = block[0].weight
    assert units(nn.ModuleDict({"layers": blocks})) == [*blocks]


def shard_convolutions(accelerator, folder):
    os.environ["FSDP_VERSION"] = "2"
    of_accelerate_fsdp.use_fsdp_on_cpu(accelerator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    expected = model(images)
    shard(accelerator, model)
    return [expected.tolist(), model(images).tolist()]


def test_a_model_in_channels_last_is_sharded(tmp_path):
    """On a GPU the weights of convolutions are in this format, which FSDP2 refuses."""
    for expected, found in runs.in_group(shard_convolutions, 2, tmp_path):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=1e-6)
