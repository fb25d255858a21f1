"""A GPU that cannot train with the given settings is refused in one line; tests may share a GPU between processes.

No GPU is needed: the tests replace the functions with which torch and Accelerate find GPUs.
"""

import os
from types import SimpleNamespace

import accelerate
import pytest
import torch

from shared.config.options import Options
from shared.errors import UserError
from shared.processes import starting

pytestmark = pytest.mark.usefixtures("launched_by_nobody")
TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver"


# A recipe, in a process where the initialization of CUDA fails with this text.
def gpus_of(monkeypatch, *capabilities):
    """Make torch find one NVIDIA GPU of each of these compute capabilities."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU number {index}")


@pytest.mark.parametrize("environment", [{}, {"ACCELERATE_MIXED_PRECISION": "bf16"}])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_bf16_on_a_gpu_that_is_too_old_is_refused_on_every_process(monkeypatch, environment, rank):
    gpus_of(monkeypatch, (8, 0), (7, 5))
    for name, value in ({"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"} | environment).items():
        monkeypatch.setenv(name, value)
    config = Options() if environment else Options(mixed_precision="bf16")
    with pytest.raises(UserError, match=r"bf16 needs .* 8\.0 or newer, and GPU number 1 has 7\.5: use .*fp16"):
        starting.check_environment(config, on_cpu=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # the second GPU does not train
    monkeypatch.setenv("LOCAL_RANK", "0")
    starting.check_environment(config, on_cpu=False)


@pytest.mark.parametrize(
    ("reason", "visible", "refused"),
    [
        (TOO_OLD, None, True),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", "0", True),
        (TOO_OLD, "", False),  # the user asked for no GPU
        ("Found no NVIDIA driver on your system.", None, False),
        ("No CUDA GPUs are available", None, False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_refused_and_a_machine_without_gpu_is_accepted(
    monkeypatch, reason, visible, refused
):
    def fail():
        raise RuntimeError(f"{reason}\nand more")

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if not refused:
        assert not starting.has_accelerator()
        return
    with pytest.raises(UserError, match=r"built for CUDA 13\.0, cannot use this machine's GPU \(.*ACCELERATE_USE_CPU"):
        starting.has_accelerator()


# More than one process on one GPU


def stand_in(monkeypatch):
    """Replace the class Accelerator by a function that records its arguments; return them."""
    asked = {}

    def make(**given):
        asked.update(given)
        state = SimpleNamespace()
        return SimpleNamespace(
            num_processes=2, distributed_type=accelerate.DistributedType("MULTI_GPU"), state=state, ddp_handler=None
        )

    monkeypatch.setattr(accelerate, "Accelerator", make)
    return asked


@pytest.mark.parametrize(("gpus", "backend"), [(1, "gloo"), (2, "nccl")])
def test_processes_share_a_gpu_over_gloo_if_a_test_asks_for_it(monkeypatch, gpus, backend):
    gpus_of(monkeypatch, *[(9, 0)] * gpus)
    asked = stand_in(monkeypatch)
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", starting.SHARE_GPU: "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ACCELERATE_BYPASS_DEVICE_MAP", "false")
    starting.start(Options())
    (handler,) = asked["kwargs_handlers"]
    assert handler.backend == backend
    assert not asked["cpu"]
    assert (os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] == "true") == (gpus == 1)  # DDP gets no GPU index


@pytest.mark.parametrize(
    ("value", "message"),
    [("", r"2 processes on a machine with 1 GPU\(s\): lower"), ("please", "is 'please': expected one of")],
)
def test_more_processes_than_gpus_are_refused_by_default(monkeypatch, value, message):
    gpus_of(monkeypatch, (9, 0))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    if value:
        monkeypatch.setenv(starting.SHARE_GPU, value)
    with pytest.raises(UserError, match=message):
        starting.check_environment(Options(), on_cpu=False)
