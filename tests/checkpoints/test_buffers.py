"""The file images in memory equal the files that Accelerate writes, also after the values change."""

import os
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shared.checkpoints import buffers as checkpoint_buffers
from shared.checkpoints.buffers import Buffers
from shared.checkpoints.files import create_files, write_files
from shared.checkpoints.layout import distinct, flatten, lay_out
from shared.checkpoints.saving import changed_by
from shared.config.options import Options
from shared.optimization.optimizers import make_optimizer

MODEL, OPTIMIZER = "model.safetensors", "optimizer.bin"


class Net(nn.Module):
    """Tied weights, a buffer, and a transposed, a half-precision and an empty parameter."""

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
        return (
            self.head.bias.sum()
            + hidden.sum()
            + self.head.weight.sum()
            + self.sixteen_bits.float().sum()
            + self.empty.sum()
        )


@pytest.fixture(params=["adamw", "sgd"])
def trained(request):
    """A model, its optimizer, and a function that makes one training step."""
    torch.manual_seed(0)
    model = Net()
    optimizer = make_optimizer(model, Options(optim=request.param, learning_rate=0.01, weight_decay=0.01))

    def step(learning_rate):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        model(torch.arange(6)).backward()
        optimizer.step()

    step(0.02)
    return model, optimizer, step


def states(model, optimizer):
    return {MODEL: model.state_dict()}, {OPTIMIZER: optimizer.state_dict()}


def write(buffers, folder):
    folder.mkdir()
    create_files(folder, buffers.images)
    for name, line in write_files(folder, buffers.images, {}).items():
        assert line["bytes"] == (folder / name).stat().st_size
    return folder


def assert_equal(folder, model, optimizer):
    """Check that the files in a folder are intact and hold the current state."""
    tensors, expected = load_file(folder / MODEL), model.state_dict()
    assert set(tensors) == set(expected) - {"head.weight"}
    assert all(torch.equal(tensors[name], expected[name]) for name in tensors)
    loaded = flatten(torch.load(folder / OPTIMIZER, weights_only=True))
    now = flatten(optimizer.state_dict())
    assert (loaded.shape, loaded.floats) == (now.shape, now.floats)
    assert all(torch.equal(a, b) for a, b in zip(loaded.tensors, now.tensors, strict=True))
    with zipfile.ZipFile(folder / OPTIMIZER) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("lasting", [True, False])
def test_files_written_after_more_steps_equal_those_of_a_fresh_save(trained, lasting, tmp_path):
    model, optimizer, step = trained
    buffers = Buffers(lay_out(*states(model, optimizer)))
    for learning_rate in (0.03, 1e-9, 0.0):
        step(learning_rate)
        models, optimizers = states(model, optimizer)
        changed = {tensor.data_ptr() for tensor in changed_by(optimizer)}
        assert buffers.copy(buffers.values_of(models | optimizers), changed if lasting else ()).wait()
        folder = write(buffers, tmp_path / str(learning_rate))
        assert_equal(folder, model, optimizer)
        save_file({k: v.contiguous() for k, v in distinct(models[MODEL]).items()}, tmp_path / "fresh", {"format": "pt"})
        assert (folder / MODEL).read_bytes() == (tmp_path / "fresh").read_bytes()
    buffers.close()


def test_a_state_of_a_different_shape_is_not_copied_into_the_layout(trained):
    model, optimizer, step = trained
    buffers = Buffers(lay_out(*states(model, optimizer)))
    before = os.pread(buffers.images[OPTIMIZER].descriptor, 1 << 20, 0)
    step(0.5)
    optimizer.param_groups[0]["amsgrad"] = "other"
    models, optimizers = states(model, optimizer)
    assert buffers.values_of(models | optimizers) is None
    optimizer.param_groups[0].pop("amsgrad")
    optimizer.state.popitem()
    assert buffers.values_of(models | {OPTIMIZER: optimizer.state_dict()}) is None
    assert os.pread(buffers.images[OPTIMIZER].descriptor, 1 << 20, 0) == before
    buffers.close()


def test_too_little_memory_is_an_error_that_names_the_needed_and_the_free_memory(trained, monkeypatch):
    model, optimizer, _ = trained
    monkeypatch.setattr(checkpoint_buffers, "available_memory", lambda: 100)
    with pytest.raises(MemoryError, match="0 MB of memory are needed, and 0 MB are free"):
        Buffers(lay_out(*states(model, optimizer)))


def test_the_available_memory_is_known_and_plausible():
    assert 1 << 20 < checkpoint_buffers.available_memory() < 1 << 50


def test_a_run_on_the_cpu_does_not_use_the_gpu_of_its_machine(trained, monkeypatch):
    """A CUDA context would take GPU memory, and would fail on a GPU that another process uses exclusively."""
    model, optimizer, _ = trained
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("Stream", "cudart", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name} is called"))
    buffers = Buffers(lay_out(*states(model, optimizer)))
    try:
        lasting = {tensor.data_ptr() for tensor in changed_by(optimizer)}
        values = buffers.values_of({MODEL: model.state_dict(), OPTIMIZER: optimizer.state_dict()})
        assert buffers.copy(values, lasting).wait()
    finally:
        buffers.close()
