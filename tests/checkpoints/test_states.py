"""The state of a model, its optimizer and registered objects survives its files, under names that anyone can read."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.swa_utils import AveragedModel

from shared.checkpoints import states
from shared.checkpoints.folders import Job, write_checkpoint
from shared.checkpoints.staging import Staging
from shared.config.options import Options
from shared.models.optimizers import ChainedOptimizers
from shared.optimization.optimizers import make_optimizer

MODEL = "model.safetensors"


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


class Summing(torch.optim.SGD):
    """Keeps the sum of all gradients in float64, which torch would load as the parameter's dtype."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            total = self.state[p].setdefault("total", torch.zeros(p.shape, dtype=torch.float64))
            p.sub_(0.01 * total.add_(p.grad))


def train(model, optimizer, average, steps):
    for _ in range(steps):
        model(torch.arange(6)).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return [tensor.clone() for each in (model, average) for tensor in each.state_dict().values()]


def built(kind):
    """A model, its optimizer, and its average."""
    torch.manual_seed(0)
    model = Net()
    config = Options(optim="sgd" if kind == "sgd" else "adamw", learning_rate=0.01)
    optimizer = make_optimizer(model, config)
    if kind == "float64":
        optimizer = Summing(model.parameters())
    if kind == "two":
        own = [*model.norm.parameters()]
        rest = [p for p in model.parameters() if all(p is not mine for mine in own)]
        optimizer = ChainedOptimizers([torch.optim.SGD(own, lr=0.1, momentum=0.9), torch.optim.AdamW(rest, lr=0.01)])
    return model, optimizer, AveragedModel(model)


def state_of(model, optimizer, average):
    """The tensors of all objects, by file, and the plain values of the optimizer."""
    modules = states.modules_by_file(model, [average])
    files = {file: states.distinct(module.state_dict()) for file, module in modules.items()}
    files[states.OPTIMIZER], described = states.optimizer_state(model, optimizer)
    return files, {"optimizers": [described]}


def saved(folder, files, values):
    """Write a checkpoint of a state."""
    write_checkpoint(Job(folder / "step_00000003", files, {"state.json": json.dumps(values).encode()}))
    return folder / "step_00000003"


@pytest.mark.parametrize("kind", ["adamw", "sgd", "two", "float64"])
def test_a_loaded_state_continues_bit_by_bit(kind, tmp_path):
    model, optimizer, average = built(kind)
    train(model, optimizer, average, 2)
    files, values = state_of(model, optimizer, average)
    staging = Staging(files)
    staging.copy(files).result()
    path = saved(tmp_path, staging.places, values)
    staging.close()
    expected = train(model, optimizer, average, 2)
    other, theirs, mean = built(kind)
    for file, module in states.modules_by_file(other, [mean]).items():
        states.load_model(module, path / file)
    states.load_optimizer(path, other, theirs)
    assert all(map(torch.equal, train(other, theirs, mean, 2), expected))


def test_files_have_the_names_of_parameters_and_equal_those_of_safetensors(tmp_path):
    model, optimizer, average = built("two")
    train(model, optimizer, average, 1)
    path = saved(tmp_path, *state_of(model, optimizer, average))
    tensors = load_file(path / states.OPTIMIZER)
    assert {"norm.weight/momentum_buffer", "embedding.weight/exp_avg", "embedding.weight/step"} < set(tensors)
    assert set(load_file(path / MODEL)) == set(model.state_dict()) - {"head.weight"}
    plain = {name: tensor.contiguous() for name, tensor in states.distinct(model.state_dict()).items()}
    save_file(plain, tmp_path / "theirs", {"format": "pt"})
    assert all(map(torch.equal, load_file(tmp_path / "theirs").values(), load_file(path / MODEL).values()))


def test_another_model_or_other_groups_are_refused(tmp_path):
    model, optimizer, average = built("two")
    train(model, optimizer, average, 1)
    path = saved(tmp_path, *state_of(model, optimizer, average))
    with pytest.raises(ValueError, match="its optimizer has other parameters"):
        states.load_optimizer(path, model, ChainedOptimizers(optimizer.optimizers[::-1]))
    with pytest.raises(RuntimeError, match="size mismatch"):
        states.load_model(nn.ModuleDict({"embedding": nn.Embedding(11, 6)}), path / MODEL)
    with pytest.raises(RuntimeError, match="it differs in "):
        states.load_model(nn.ModuleDict({"embedding": nn.Embedding(11, 5)}), path / MODEL)
