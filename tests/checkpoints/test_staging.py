"""The memory of a state: what fits it, how much is free, and which device is used."""

import pytest
import torch
from torch import nn

from shared.checkpoints import staging
from shared.checkpoints.staging import Staging


@pytest.fixture
def files():
    return {"model.safetensors": dict(nn.Linear(3, 2).state_dict())}


def test_too_little_memory_is_an_error_that_names_the_needed_and_the_free_memory(files, monkeypatch):
    monkeypatch.setattr(staging, "available_memory", lambda: 100)
    with pytest.raises(MemoryError, match="0 MB of memory are needed, and 0 MB are free"):
        Staging(files)


def test_the_available_memory_is_known_and_plausible():
    assert 1 << 20 < staging.available_memory() < 1 << 50


def test_a_state_of_other_shapes_or_names_does_not_fit(files):
    memory = Staging(files)
    assert memory.fits({name: {key: t + 1 for key, t in of_file.items()} for name, of_file in files.items()})
    assert not memory.fits({"model.safetensors": {"weight": torch.ones(2, 3)}})
    assert not memory.fits({name: {key: t.double() for key, t in of_file.items()} for name, of_file in files.items()})
    memory.close()


def test_a_run_on_the_cpu_does_not_use_the_gpu_of_its_machine(files, monkeypatch):
    """A CUDA context would take GPU memory, and would fail on a GPU that another process uses exclusively."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("Stream", "cudart", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: pytest.fail(f"torch.cuda.{name} is called"))
    memory = Staging(files)
    lasting = {tensor.data_ptr() for tensor in files["model.safetensors"].values()}
    memory.copy(files, lasting).result()
    memory.close()


def test_the_limits_of_the_groups_around_the_own_one_count(tmp_path, monkeypatch):
    """A scheduler may limit the group of a job, and a process of it is in a group inside."""
    groups = tmp_path / "groups"
    for name, limit in (("job", "5000"), ("job/task", "max")):
        (groups / name).mkdir(parents=True)
        for file, text in (("max", limit), ("current", "3000"), ("stat", "inactive_file 100\nactive_file 10")):
            (groups / name / f"memory.{file}").write_text(text)
    (tmp_path / "own").write_text("1:cpu:/\n0::/job/task\n")
    places = {"/sys/fs/cgroup": groups, "/proc/self/cgroup": tmp_path / "own"}
    monkeypatch.setattr(staging, "Path", lambda name: places[name])
    assert staging.available_memory() == 5000 - 3000 + 110
