"""A torch version with a new file layout causes a warning, and checkpoints are still written."""

import gc
import io
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from safetensors.torch import save as safetensors_bytes
from torch import nn

from shared.checkpoints import layout, resuming
from shared.checkpoints.progress import Progress
from shared.checkpoints.saving import Saver
from shared.config.options import Options
from shared.optimization.optimizers import make_optimizer
from shared.plan.batches import Plan

PLAN = Plan(num_samples=20, seed=0, global_batch_size=2, num_epochs=1)
SAVE, LOAD = torch.save, torch.load


def rewritten(change):
    """A torch.save that rewrites its archive: `change(name, content)` returns (name, content, compression)."""

    def save(state, file):
        SAVE(state, file)
        if isinstance(file, Path | io.BytesIO):  # the ordinary save
            return
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        file.seek(0)
        file.truncate()
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in records.items():
                new_name, new_content, compression = change(name, content)
                archive.writestr(new_name, new_content, compression)

    return save


def renamed(name, content):
    return name.replace("data.pkl", "state.pkl"), content, zipfile.ZIP_STORED


def without_checksums_behind(name, content):
    return name, content, zipfile.ZIP_STORED


def text_of_floats(name, content):
    """Protocol 0 writes floats as text."""
    return name, pickle.dumps({"lr": 0.1}, 0) if name.endswith("data.pkl") else content, zipfile.ZIP_STORED


def loaded_elsewhere(*args, **arguments):
    """A torch.load that reads the file instead of mapping it."""
    return LOAD(*args, **arguments | {"mmap": False})


def other_header(*args):
    """A safetensors with a different header key for the offsets of a tensor."""
    return safetensors_bytes(*args).replace(b"data_offsets", b"byte_ranges_")


def broken(*_, **__):
    raise RuntimeError("torch does not do that any more")


CHANGES = {
    "data.pkl has another name": (torch, "save", rewritten(renamed)),
    "no checksum behind a record": (torch, "save", rewritten(without_checksums_behind)),
    "floats are text": (torch, "save", rewritten(text_of_floats)),
    "loading does not map the file": (torch, "load", loaded_elsewhere),
    "loading fails": (torch, "load", broken),
    "another header of safetensors": (layout, "safetensors_bytes", other_header),
    "no mapping of files": (torch, "from_file", broken),
}


@pytest.fixture
def run(tmp_path):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    config = Options(output_dir=str(tmp_path), checkpointing_steps="1")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model, optimizer = accelerator.prepare(model, make_optimizer(model, config))
    run = SimpleNamespace(accelerator=accelerator, config=config, model=model, optimizer=optimizer, progress=Progress())
    run.saver = Saver(accelerator, config, PLAN)

    def step():
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        run.progress.step += 1
        run.saver.save(run.progress, {})

    run.step = step
    yield run
    run.saver.close()
    accelerator.free_memory()


@pytest.mark.parametrize("change", CHANGES)
def test_an_unknown_layout_causes_one_warning_and_saves_for_which_the_training_waits(run, change, monkeypatch, capfd):
    gc.collect()  # of earlier tests
    before = set(Path("/proc/self/fd").iterdir())
    with monkeypatch.context() as patches:
        patches.setattr(*CHANGES[change])
        run.step()
        assert not run.saver.in_background
        assert set(Path("/proc/self/fd").iterdir()) <= before, "memory was not freed"
        run.step()
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"checkpoints are written while the training waits: torch {torch.__version__} or ")
    run.step()
    run.saver.finish()
    assert capfd.readouterr().err == ""
    newest = resuming.complete(run.config.output_dir)[run.progress.step]
    assert resuming.problem_with(newest) is None
    weights = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    tensors = load_file(newest / "model.safetensors")
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    state = torch.load(newest / "optimizer.bin", weights_only=True)
    assert str(state) == str(run.optimizer.state_dict())
    run.accelerator.load_state(str(newest))


def test_a_known_layout_is_written_in_the_background(run, capfd):
    run.step(), run.step()
    run.saver.finish()
    assert run.saver.in_background
    assert capfd.readouterr().err == ""
