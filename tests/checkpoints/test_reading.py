"""Files of a checkpoint are read straight into memory, and equal what torch and safetensors read."""

import os

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn

from shared.checkpoints import files, layout, resuming
from shared.checkpoints.layout import UnknownLayout, flatten, read_archive, read_model
from shared.checkpoints.progress import Progress
from shared.compat import of_torch
from shared.config.options import Options
from shared.errors import UserError


def archived(file):
    """A file with tensors of several sizes, kinds and layouts in memory; returns the state that torch.load reads."""
    base = torch.arange(24.0).view(4, 6)
    state = {
        "state": {i: {"step": torch.tensor(3.0), "average": torch.randn(size)} for i, size in enumerate((1, 0, 700))},
        "views": [base, base[1], base.t(), base[:, ::2]],
        "kinds": (torch.arange(5), torch.ones(3, dtype=torch.bfloat16), torch.tensor([True, False])),
        "parameter": nn.Parameter(torch.randn(2, 3)),
        "groups": [{"lr": 0.1, "params": [0, 1], "name": "all"}],
    }
    torch.save(state, file)
    return torch.load(file, weights_only=True)


def assert_equal(one, other):
    one, other = flatten(one), flatten(other)
    assert (one.shape, one.floats) == (other.shape, other.floats)
    for mine, theirs in zip(one.tensors, other.tensors, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
        assert type(mine) is type(theirs)


@pytest.mark.parametrize("chunk", [1 << 20, 100], ids=["in one piece", "in pieces"])
def test_an_archive_equals_what_torch_loads_and_does_not_depend_on_the_file_any_more(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(files.digests, "CHUNK", chunk)
    expected = archived(tmp_path / "file")
    found = read_archive(tmp_path / "file")
    (tmp_path / "file").write_bytes(bytes((tmp_path / "file").stat().st_size))
    assert_equal(found, expected)
    found["views"][0][1, 2] = 99  # views share their memory, as before
    assert found["views"][1][2] == found["views"][2][2, 1] == found["views"][3][1, 1] == 99


def test_an_archive_of_an_unknown_layout_is_left_to_torch(tmp_path, monkeypatch):
    def unknown(_):
        raise UnknownLayout("new")

    expected = archived(tmp_path / "file")
    monkeypatch.setattr(of_torch, "archive_records", unknown)
    monkeypatch.setattr(layout, "read_into", None)
    assert_equal(read_archive(tmp_path / "file"), expected)


def tied():
    model = nn.ModuleDict({"one": nn.Linear(300, 4), "two": nn.Linear(300, 4), "norm": nn.BatchNorm1d(4)})
    model["two"].weight = model["one"].weight
    return model


@pytest.fixture
def written(tmp_path):
    """The state of a model, and the file that has it."""
    state = {name: torch.randn(t.shape).to(t.dtype) for name, t in layout.distinct(tied().state_dict()).items()}
    save_file(state, tmp_path / "file", {"format": "pt"})
    return state, tmp_path / "file"


def test_a_model_is_read_into_its_own_memory_and_autograd_notices(written, monkeypatch):
    monkeypatch.setattr(files.digests, "CHUNK", 1000)
    state, file = written
    model = tied()
    before = {name: (tensor.data_ptr(), tensor._version) for name, tensor in model.state_dict().items()}
    assert read_model(model, file)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state.get(name, state["one.weight"]))
        assert tensor.data_ptr() == before[name][0]
        assert tensor._version > before[name][1]


class Doubled(nn.Linear):
    """Its state is no memory of its own."""

    def state_dict(self, *args, **arguments):
        return {name: 2 * tensor for name, tensor in super().state_dict(*args, **arguments).items()}


UNFIT = {
    "another shape": lambda: nn.ModuleDict(dict(tied().items()) | {"two": nn.Linear(300, 5)}),
    "another dtype": lambda: tied().half(),
    "a parameter that the file lacks": lambda: nn.ModuleDict(dict(tied().items()) | {"three": nn.Linear(1, 1)}),
    "fewer parameters": lambda: nn.ModuleDict({"one": nn.Linear(300, 4), "norm": nn.BatchNorm1d(4)}),
    "another layout in memory": lambda: nn.ModuleDict(dict(tied().items()) | {"one": transposed()}),
    "a state that is computed": lambda: Doubled(300, 4),
    "no memory": lambda: tied().to("meta"),
}


def transposed():
    linear = nn.Linear(300, 4)
    linear.weight = nn.Parameter(torch.randn(300, 4).t())
    return linear


@pytest.mark.parametrize("kind", UNFIT)
def test_a_file_that_does_not_fit_leaves_the_model_as_it_is(written, kind):
    model = UNFIT[kind]()
    if kind == "a state that is computed":
        save_file(dict(nn.Linear(300, 4).state_dict()), written[1])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not read_model(model, written[1])
    if kind != "no memory":
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_only_named_parameters_may_be_missing(written):
    state, file = written
    save_file({name: tensor for name, tensor in state.items() if name != "two.bias"}, file)
    assert not read_model(tied(), file)
    assert not read_model(tied(), file, may_lack=["one.bias"])
    assert read_model(tied(), file, may_lack=["two.bias"])


def test_a_checkpoint_that_becomes_shorter_while_it_is_read_is_refused_with_one_line(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(9, 9))
    accelerator.save_state(str(tmp_path / "kept"))
    weights = tmp_path / "kept/model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(UserError, match=r"kept cannot be read \(.*too early.*start the same command again"):
        resuming.load(accelerator, tmp_path / "kept")
    accelerator.free_memory()


def test_a_damaged_best_checkpoint_is_not_exported(tmp_path, capsys, monkeypatch):
    accelerator = Accelerator(cpu=True)
    config = Options(output_dir=str(tmp_path), load_best_model_at_end=True, metric_for_best_model="loss")
    path = resuming.path_of(tmp_path, 1)
    progress = Progress(step=2, best_step=1)
    monkeypatch.setattr(resuming, "load", None)  # it must not be called
    path.mkdir(parents=True)
    (path / "state.json").write_text("damaged")
    (path / "manifest.json").write_text('{"state.json": {"bytes": 7, "sha256": "0"}}')
    resuming.load_best(accelerator, config, progress)
    expected = (
        f"warning: {path}, with the best model, cannot be read (state.json is damaged): model/ has the last one\n"
    )
    assert capsys.readouterr().out == expected
    assert progress.best_step == 2
    accelerator.free_memory()


def test_memory_keeps_its_values_when_its_pages_are_requested():
    memory = bytearray(os.urandom(5 * files.PAGESIZE + 7))
    before = bytes(memory)
    for start, end in ((0, None), (1, 2), (9, 9), (100, 3 * files.PAGESIZE)):
        files.populate(memoryview(memory)[start:end])
    assert bytes(memory) == before
