"""The state of models, optimizers and registered objects survives its files, under names that anyone can read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from shared.checkpoints import states
from shared.checkpoints.folders import Job, write
from shared.checkpoints.staging import Staging
from shared.config.options import Options
from shared.errors import UserError
from shared.optimization.optimizers import make_optimizer


class Net(nn.Module):
    """Tied weights, buffers, and a transposed, a half-precision and an empty parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(5)
        self.transposed = nn.Parameter(torch.randn(3, 5).T)
        self.sixteen_bits = nn.Parameter(torch.randn(7, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, ids):
        hidden = self.norm(self.embedding(ids)) @ self.transposed
        outputs = hidden, self.head.bias, self.head.weight, self.sixteen_bits.float(), self.empty
        return sum(output.square().sum() for output in outputs)


def train(model, optimizers, average, steps):
    for _ in range(steps):
        model(torch.arange(6)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model)
    return [tensor.clone() for each in (model, average) for tensor in each.state_dict().values()]


def built(kind):
    """A model, the optimizers of its parameters, and its average."""
    torch.manual_seed(0)
    model = Net()
    config = Options(optim="sgd" if kind == "sgd" else "adamw", learning_rate=0.01)
    optimizers = [make_optimizer(model, config)]
    if kind == "two":
        own = [*model.norm.parameters()]
        rest = [p for p in model.parameters() if all(p is not mine for mine in own)]
        optimizers = [torch.optim.SGD(own, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)]
    return model, optimizers, AveragedModel(model)


def saved(folder, values, files):
    """Write a checkpoint of a state."""
    values = json.dumps(values | {"scaler": None}).encode()
    write(Job(folder / "step_00000003", files, {"state.json": values}))
    return folder / "step_00000003"


@pytest.mark.parametrize("kind", ["adamw", "sgd", "two"])
def test_a_loaded_state_continues_bit_by_bit(kind, tmp_path):
    model, optimizers, average = built(kind)
    train(model, optimizers, average, 2)
    files, values = states.state_of([model], optimizers, [average])
    staging = Staging(files)
    assert staging.copy(files).wait()
    path = saved(tmp_path, values, staging.places)
    staging.close()
    expected = train(model, optimizers, average, 2)
    other, theirs, mean = built(kind)
    states.load_model(other, path / states.MODEL)
    states.load_state(path, [other], theirs, [mean])
    assert all(map(torch.equal, train(other, theirs, mean, 2), expected))


def test_files_have_the_names_of_parameters_and_equal_those_of_safetensors(tmp_path):
    model, optimizers, average = built("two")
    train(model, optimizers, average, 1)
    path = saved(tmp_path, *reversed(states.state_of([model], optimizers, [average])))
    tensors = load_file(path / states.OPTIMIZER)
    assert {"norm.weight/momentum_buffer", "embedding.weight/exp_avg", "embedding.weight/step"} < set(tensors)
    assert set(load_file(path / states.MODEL)) == set(model.state_dict()) - {"head.weight"}
    plain = {name: tensor.contiguous() for name, tensor in states.distinct(model.state_dict()).items()}
    save_file(plain, tmp_path / "theirs", {"format": "pt"})
    assert all(map(torch.equal, load_file(tmp_path / "theirs").values(), load_file(path / states.MODEL).values()))
    found = states.state_dicts(path)
    assert found["names"][0] == [["norm.weight", "norm.bias"]]
    other = built("two")[1]
    for optimizer, state in zip(other, found["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    for mine, theirs in zip(*([each.state_dict() for each in both] for both in (optimizers, other)), strict=True):
        assert mine["param_groups"] == theirs["param_groups"]
        for index, values in mine["state"].items():
            assert values.keys() == theirs["state"][index].keys()
            assert all(torch.equal(value, theirs["state"][index][key]) for key, value in values.items())


def test_another_model_or_other_groups_are_refused(tmp_path):
    model, optimizers, average = built("two")
    train(model, optimizers, average, 1)
    path = saved(tmp_path, *reversed(states.state_of([model], optimizers, [average])))
    with pytest.raises(ValueError, match="its optimizers have other parameters"):
        states.load_state(path, [model], optimizers[::-1], [average])
    with pytest.raises(RuntimeError, match="size mismatch"):
        states.load_model(nn.ModuleDict({"embedding": nn.Embedding(11, 6)}), path / states.MODEL)
    with pytest.raises(RuntimeError, match="it differs in "):
        states.load_model(nn.ModuleDict({"embedding": nn.Embedding(11, 5)}), path / states.MODEL)


def test_a_registered_object_keeps_nested_values_and_one_that_json_does_not_keep_is_refused():
    state = {"a": {"b": torch.ones(2), "c": 0.1, "d": {}}, "list": [1, None, "x"], "inf": float("inf")}
    tensors = {}
    plain = json.loads(json.dumps(states.separate(state, tensors)))
    assert set(tensors) == {"a/b"}
    assert str(states.joined(plain, tensors)) == str(
        {"a": {"c": 0.1, "d": {}, "b": torch.ones(2)}, "list": [1, None, "x"], "inf": float("inf")}
    )
    for wrong in ({"a": {1, 2}}, {0: 1.0}, {"a/b": 1}, {"a": [torch.ones(1)]}):
        with pytest.raises(UserError, match="in a checkpoint"):
            states.separate(wrong, {})
