"""A launch that would give a different result is refused; the processes of a machine share its resources."""

import os
import socket
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import accelerate
import pytest
import runs
import torch

from shared.config.options import Options
from shared.errors import UserError
from shared.options.data_options import ModelOptions
from shared.processes import agreement, ending, rules, starting
from shared.run import command

pytestmark = pytest.mark.usefixtures("launched_by_nobody")


def test_freed_memory_is_kept_for_the_next_step(tmp_path):
    # In a separate process, because the setting lasts until the process ends.
    (tmp_path / "steps.py").write_text("""
import resource, torch
from shared.processes import starting
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    before = faults()
    torch.ones(2**23).sum()  # 32 MiB, 8,192 pages
    return faults() - before
step()
fresh = step()
starting.keep_freed_memory()
print(fresh, min(step() for _ in range(30)))  # in the first ones, the kept memory still grows
""")
    _, printed = runs.run_forked(1, tmp_path / "steps.py", [], tmp_path)
    fresh, kept = map(int, printed.split())
    assert fresh > 8000
    assert kept < fresh / 10


# Guards


def set_all(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def gpus(monkeypatch, number):
    """Make torch find this number of NVIDIA GPUs."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: number)
    if number:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
COMPRESSED = {"gradient_compression": "bf16", "mixed_precision": "no"}
BF16, BF16_ACTIVATIONS = {"ACCELERATE_MIXED_PRECISION": "bf16"}, {"activation_dtype": "bf16"}
AUTOCAST = "--activation_dtype bf16 computes without autocast, .*--mixed_precision no"
ALONE_OF_TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("available", "environment", "flags", "message"),
    [
        (0, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, {}, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 4"),
        (0, {"ACCELERATE_USE_DEEPSPEED": "true"}, {}, "support only DDP and FSDP2"),
        (0, {"ACCELERATE_TORCH_DEVICE": "cuda:1"}, {}, "ACCELERATE_TORCH_DEVICE is cuda:1: all processes would use"),
        (0, {"ACCELERATE_MIXED_PRECISION": "FP16"}, {}, "PRECISION is 'FP16': expected one of no, fp16, bf16"),
        (0, {"ACCELERATE_USE_FSDP": "1"}, {}, "ACCELERATE_USE_FSDP is '1': expected one of true, false"),
        (0, {"ACCELERATE_USE_CPU": "ja"}, {}, "ACCELERATE_USE_CPU is 'ja': expected one of y, yes, t, true"),
        (0, {"CXX": "no-such"}, {"torch_compile": True}, "--torch_compile needs a compiler, and there is no no-such: "),
        (0, {"NPROC": "2", "MIXED_PRECISION": "bf16"}, {}, "bf16 of notebook_launcher"),
        (0, {"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "fp16 needs a GPU .*--mixed_precision no or bf16"),
        (1, {"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, "fp8 is not supported: use --mixed_precision bf16"),
        (0, FSDP, {}, "FSDP needs a GPU, .*multi_cpu.yaml, or set ACCELERATE_USE_CPU=true"),
        (0, FSDP | {"ACCELERATE_USE_CPU": "true"}, {}, "FSDP on a CPU with one process .*cpu.yaml"),
        (1, FSDP | {"FSDP_VERSION": "1"}, {}, "fsdp_version 1 .*set fsdp_version: 2"),
        (1, FSDP, {"mixed_precision": "fp16"}, "fp16 does not work under FSDP .*use bf16"),
        (1, FSDP, {"optim": "sgd"}, "--optim sgd does not work under FSDP.*--optim adamw, or DDP"),
        (1, FSDP, {"ema_decay": 0.9}, "^--ema_decay 0.9 does not work under FSDP: use --ema_decay None, or DDP"),
        (1, FSDP, {"torch_compile": True}, "^--torch_compile True does not .*FSDP: use --torch_compile False, or DDP"),
        (1, FSDP, COMPRESSED, "--gradient_compression bf16 does not work under FSDP"),
        (1, FSDP, {"save_on_each_node": True}, "--save_on_each_node True does not work under FSDP"),
        (1, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {}, r"2 processes on a machine with 1 GPU\(s\): lower"),
        (0, ALONE_OF_TWO, {}, "WORLD_SIZE is 2 without LOCAL_RANK: .*torchrun"),
        (0, {"OMPI_COMM_WORLD_SIZE": "4"}, {}, "OMPI_COMM_WORLD_SIZE is 4, as set by mpirun or srun.*torchrun"),
        (0, {"WORLD_SIZE": "2"}, {}, "WORLD_SIZE is 2 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        # Settings are also checked without a command line, as a notebook could set them.
        (0, {}, {"output_dir": ""}, "--output_dir '' would be the working directory"),
        (0, {}, {"expect_processes": 2}, "--expect_processes 2, but 1 started.*torchrun --nproc-per-node"),
        *((1, BF16, BF16_ACTIVATIONS | {"mixed_precision": it}, AUTOCAST) for it in ("bf16", "fp16", "launcher")),
    ],
)
def test_a_launch_that_would_give_a_different_result_is_refused(monkeypatch, available, environment, flags, message):
    gpus(monkeypatch, available)
    set_all(monkeypatch, environment)
    with pytest.raises(UserError, match=message):
        starting.start(ModelOptions(**flags))


@pytest.mark.parametrize(
    ("available", "environment", "flags"),
    [
        (1, {"ACCELERATE_MIXED_PRECISION": "fp16"}, {}),
        (0, {"ACCELERATE_MIXED_PRECISION": "fp16"}, {"mixed_precision": "bf16"}),  # the flag wins
        (0, {"NPROC": "2", "MIXED_PRECISION": "bf16"}, {"mixed_precision": "bf16"}),
        (0, {"MIXED_PRECISION": "bf16"}, {}),  # a user's own variable for another script
        (2, FSDP | {"LOCAL_RANK": "1"}, {}),
        (2, FSDP | {"LOCAL_RANK": "1", "FSDP_OFFLOAD_PARAMS": "True"}, {}),
        (0, FSDP | ALONE_OF_TWO | {"LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}, {}),
        (0, ALONE_OF_TWO | {"LOCAL_RANK": "0"}, {}),
        (0, ALONE_OF_TWO | {"LOCAL_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"}, {}),  # a launcher set LOCAL_RANK
    ],
)
def test_a_launch_that_this_machine_can_run_is_accepted(monkeypatch, available, environment, flags):
    gpus(monkeypatch, available)
    set_all(monkeypatch, environment)
    rules.refuse(rules.Launch(ModelOptions(**flags), os.environ, on_cpu=available == 0))


def test_fsdp_is_refused_if_the_settings_do_not_allow_it(monkeypatch):
    gpus(monkeypatch, 2)
    set_all(monkeypatch, FSDP)
    with pytest.raises(UserError, match=r"^distributed_type FSDP needs settings that allow it, .* ExtraOptions$"):
        starting.start(Options())


def test_processes_that_each_train_alone_are_refused(monkeypatch):
    set_all(monkeypatch, ALONE_OF_TWO | {"LOCAL_RANK": "0"})
    alone = {"num_processes": 1, "distributed_type": accelerate.DistributedType("NO"), "ddp_handler": None}
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: SimpleNamespace(state=SimpleNamespace(), **alone))
    assert "WORLD_SIZE is 2, but Accelerate has 1 process(es)" in runs.refusal(starting.start, Options())


# GPUs. No GPU is needed: the tests replace the functions with which torch and Accelerate find GPUs


@pytest.mark.parametrize(
    ("reason", "visible", "refused"),
    [
        ("The NVIDIA driver on your system is too old (found version 11040)", "0", True),
        ("The NVIDIA driver on your system is too old (found version 11040)", "", False),  # the user asked for no GPU
        ("No CUDA GPUs are available", "0", False),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_refused_and_a_machine_without_gpu_is_accepted(
    monkeypatch, reason, visible, refused
):
    gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", mock.Mock(side_effect=RuntimeError(f"{reason}\nand more")))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    problem = runs.problem_of(starting.has_accelerator)
    assert (problem is not None) == refused
    assert not refused or "built for CUDA 13.0, cannot use this machine's GPU (" in problem


# Resources that processes share


@pytest.mark.parametrize(
    ("environment", "cores", "threads"),
    [
        ({}, 8, 8),
        ({"OMP_NUM_THREADS": "4,2"}, 8, 4),
        ({"LOCAL_WORLD_SIZE": "4"}, 2, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}, 8, 4),  # torchrun set the 1
        ({"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}, 8, 8),  # accelerate set the 1
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}, 8, 2),
    ],
)
def test_processes_share_the_cores_unless_the_user_sets_the_threads(monkeypatch, environment, cores, threads):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    set_all(monkeypatch, environment)
    assert starting.threads_per_process() == threads


def test_launcher_variables_that_no_launcher_sets_are_refused_and_removed(monkeypatch):
    set_all(monkeypatch, {"WORLD_SIZE": "two", "RANK": ""})
    assert "RANK=, WORLD_SIZE=two: expected a number" in runs.refusal(command.require_numbers)
    for name, value, message in (
        ("RANK", "1", "RANK is 1, of 1 process(es): "),
        ("LOCAL_RANK", "5", "LOCAL_RANK is 5, of 1 process(es): "),
        ("LOCAL_WORLD_SIZE", "0", "LOCAL_RANK is 0, of 0 process(es): "),
    ):
        command.require_numbers()
        monkeypatch.setenv(name, value)
        assert runs.refusal(command.require_numbers).startswith(message)


@pytest.mark.parametrize(("restarts", "machines", "apart"), [("0", "1", False), ("2", "1", True), ("2", "3", False)])
def test_restarted_processes_of_one_machine_use_separate_keys_of_the_store(monkeypatch, restarts, machines, apart):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"TORCHELASTIC_RESTART_COUNT": restarts, "GROUP_WORLD_SIZE": machines}
    set_all(monkeypatch, environment | {"MASTER_PORT": str(runs.free_port())})
    monkeypatch.setattr(ending, "known", ending.Peers())
    method = agreement.init_method(Options(), "cpu")
    store, rank, processes = next(torch.distributed.rendezvous(method, 0, 1, timeout=timedelta(seconds=20)))
    assert (rank, processes) == (0, 1)
    store.set("address", "mine")
    inner = store.underlying_store if apart else store
    assert inner.check(["restart-2/address" if apart else "address"])


def test_a_port_in_use_is_refused_in_one_line_without_a_launcher(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        set_all(monkeypatch, ALONE_OF_TWO | {"LOCAL_RANK": "0", "MASTER_PORT": str(port)})
        with pytest.raises(UserError, match=rf"MASTER_PORT 127.0.0.1:{port} \(python -m shared.preflight .*EADDRINUSE"):
            starting.start(Options())
