"""Every way to start a recipe gives the same run, a wrong launch does not start, and every run ends cleanly."""

import errno
import gc
import hashlib
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from types import SimpleNamespace

import accelerate
import psutil
import pytest
import runs
import torch

from shared.config import options
from shared.errors import Preempted, UserError
from shared.launch import agreement, starting
from shared.plan import seeding
from shared.processes import collectives, ending, exit_reasons, patience, signals
from shared.run import command

LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
Options = options.Options


@pytest.fixture(autouse=True)
def launched_by_nobody(monkeypatch):
    """The environment of a process that nobody launched."""
    for name in [*os.environ, *LAUNCHER]:
        if name in LAUNCHER or name.startswith(("ACCELERATE_MIXED", "ACCELERATE_USE", "ACCELERATE_GRAD", "FSDP_")):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


# Every way to start


def processes_said(said):
    """What the launch card says of them, once, by one process."""
    (found,) = re.findall(r"^ *processes +(.*)$", said, re.M)
    return found


def check(output, said, processes, alone):
    """The run in `output` was made by so many processes, left everything, and is the one made by this process."""
    assert processes_said(said) == ("1" if processes == 1 else f"{processes}, DDP over gloo")
    left = {path.name for path in output.iterdir()}
    assert left == {"config.yaml", "metrics.jsonl", "curves.png", "checkpoints", "model"}
    assert len(runs.training_lines(output)) == 4
    for line, other in zip(runs.metrics(output), runs.metrics(alone), strict=True):
        for name in ("loss", "eval_loss"):
            assert line.get(name) == pytest.approx(other.get(name), abs=1e-4)
        for name in ("step", "learning_rate", "samples"):
            assert line.get(name) == other.get(name)


LAUNCHES = {
    "torchrun": lambda: runs.torchrun(2, "recipes/nlp.py"),
    "accelerate launch": lambda: runs.accelerate_launch(
        "multi_gpu", "recipes/nlp.py", flags=["--mixed_precision", "no"]
    ),
}


@pytest.mark.parametrize("launcher", LAUNCHES)
def test_two_processes_of_a_launcher_give_the_run_of_one_and_exit_with_0(launcher, texts, alone, tmp_path):
    flags = [*runs.TINY, *texts, "--expect_processes", 2, "--output_dir", tmp_path / "run"]
    (tmp_path / "tmp").mkdir()
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path / "tmp")}
    said = runs.succeed([*LAUNCHES[launcher](), *flags], **environment)
    check(tmp_path / "run", said, 2, alone)
    left = [path.name for path in (tmp_path / "tmp").iterdir()]
    assert not [name for name in left if not name.startswith("torch")]  # torchrun's folder of logs, torch's of caches


# The same up to the first step: a dry run has built the model, formed the group and gone forward and backward once.
DRY_LAUNCHES = {
    "python": (1, lambda: [sys.executable, "recipes/nlp.py"]),
    "python -m": (1, lambda: [sys.executable, "-m", "recipes.nlp"]),
    "multi_cpu.yaml": (2, lambda: runs.accelerate_launch("multi_cpu", "recipes/nlp.py")),
}


@pytest.mark.parametrize("launcher", DRY_LAUNCHES)
def test_a_dry_run_of_any_launcher_starts_its_processes_and_leaves_nothing(launcher, texts, tmp_path):
    processes, command = DRY_LAUNCHES[launcher]
    flags = [*runs.TINY, *texts, "--expect_processes", processes, "--output_dir", tmp_path, "--dry_run"]
    said = runs.succeed([*command(), *flags], CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    assert processes_said(said) == ("1" if processes == 1 else "2, DDP over gloo")
    assert not list(tmp_path.iterdir())


def test_one_shell_per_process_gives_the_same_run_and_exits_with_0(texts, alone, tmp_path):
    command = [sys.executable, "recipes/nlp.py", *runs.TINY, *texts, "--output_dir", tmp_path / "run"]
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(runs.free_port())}
    common = address | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    shells = [runs.start(command, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(2)]
    try:
        said = ["".join(shell.communicate(timeout=240)) for shell in shells]
    finally:
        for shell in shells:
            runs.end(shell)
    assert [shell.returncode for shell in shells] == [0, 0], said
    check(tmp_path / "run", "".join(said), 2, alone)


@pytest.mark.campaign
def test_a_hundred_runs_of_two_processes_exit_with_0(texts, tmp_path):
    flags = [*runs.TINY, *texts, "--max_train_steps", 2, "--checkpointing_steps", "no"]
    for number in range(100):
        command = [*runs.torchrun(2, "recipes/nlp.py"), *flags, "--output_dir", tmp_path / str(number)]
        runs.succeed(command, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


# The end


def test_ctrl_c_saves_and_leaves_no_process_behind(texts, tmp_path):
    flags = [*runs.TINY, *texts, "--max_train_steps", 1_000_000, "--dataloader_num_workers", 1]
    command = [*runs.torchrun(2, "recipes/nlp.py"), *flags, "--output_dir", tmp_path]
    launcher = runs.start(command, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    started = []
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "metrics.jsonl").exists() or not runs.metrics(tmp_path):
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < deadline, "no step in 120 s"
            time.sleep(0.2)
        started = psutil.Process(launcher.pid).children(recursive=True)
        assert len(started) >= 4  # two training processes and a loader worker of each
        os.killpg(launcher.pid, signal.SIGINT)
        _, alive = psutil.wait_procs([psutil.Process(launcher.pid), *started], timeout=15)
        assert not alive
        out, err = launcher.communicate()
        assert str(runs.ROOT / "recipes") not in err  # no traceback from our files
        (step,) = re.findall(r"interrupted at step (\d+): checkpoint saved, start again to go on", out + err)
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {"config.yaml", "metrics.jsonl", "checkpoints", "PREEMPTED"}
        assert (tmp_path / f"checkpoints/step_{int(step):08d}/manifest.json").is_file()
    finally:
        for process in started:
            if process.is_running():
                process.kill()
        runs.end(launcher)


def digests(folder):
    return {path: hashlib.sha256(path.read_bytes()).digest() for path in folder.rglob("*") if path.is_file()}


REFUSALS = {
    "before the group exists": (["--nonsense", "3"], "unknown flag --nonsense"),
    "on every process": (["--label_column_name", "target"], "--label_column_name target"),
    "of a file": (["--train_file", "nowhere.csv"], "nowhere.csv"),
    "of a model": (["--model_name_or_path", "./nowhere"], "--model_name_or_path ./nowhere"),
    "of the number of processes": (["--global_batch_size", "1"], "--global_batch_size 1"),
    "on the main process": (["--seed", "3"], "--seed was 0, is 3"),
}


@pytest.mark.parametrize("found", REFUSALS)
def test_a_refusal_is_said_once_and_ends_every_process_with_2_and_changes_nothing(found, texts, alone, tmp_path):
    output = alone if found == "on the main process" else tmp_path
    before = digests(alone)
    flags, message = REFUSALS[found]
    command = [*runs.torchrun(2, "recipes/nlp.py"), *runs.TINY, *texts, *flags, "--output_dir", output]
    done = runs.run(command, timeout=60, CUDA_VISIBLE_DEVICES="")  # benchmarks/waits_before_training.py has the seconds
    said = done.stdout + done.stderr
    assert said.count(message) == 1, said
    assert said.count("error: ") == 1
    assert done.returncode != 0
    assert re.findall(r"exitcode +: (-?\d+)", done.stderr) == ["2", "2"], said
    # No traceback from our files; torchrun has its own, and .venv may lie in this folder.
    assert not any(f'File "{runs.ROOT / folder}' in said for folder in ("shared", "recipes"))
    assert digests(alone) == before


class Left(BaseException):
    """Raised in place of ending the process."""


@pytest.fixture
def leaving(monkeypatch, tmp_path):
    """Ends, waiting and signals are recorded instead of done: `codes`, `waited` seconds, `handlers`, `on_sleep`."""
    seen = SimpleNamespace(codes=[], waited=0.0, handlers={}, on_sleep=lambda: None)

    def leave(code):
        seen.codes.append(code)
        raise Left

    def sleep(seconds):
        seen.waited += seconds
        seen.on_sleep()

    monkeypatch.setattr(ending, "leave", leave)
    monkeypatch.setattr(command, "leave", leave)
    monkeypatch.setattr(ending, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: seen.waited))
    monkeypatch.setattr(signal, "signal", seen.handlers.__setitem__)
    monkeypatch.setattr(signals, "listen", lambda *_: None)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "12345")
    return seen


def refuse(monkeypatch, rank):
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    with pytest.raises(Left):
        ending.refuse(UserError("--seed x: give a number"))


def test_local_rank_0_says_why_waits_for_the_others_and_they_are_silent(leaving, monkeypatch, capsys):
    def refuse_later():
        if leaving.waited > 3:
            leaving.on_sleep = lambda: None
            refuse(monkeypatch, 1)

    leaving.on_sleep = refuse_later
    refuse(monkeypatch, 0)
    assert capsys.readouterr().err == "error: --seed x: give a number\n"
    assert 3 < leaving.waited < 4
    assert leaving.codes == [2, 2]


def test_a_process_that_is_first_waits_for_local_rank_0(leaving, monkeypatch, capsys):
    def speak_later():
        if leaving.waited > 3:
            leaving.on_sleep = lambda: None
            refuse(monkeypatch, 0)

    leaving.on_sleep = speak_later
    refuse(monkeypatch, 1)
    assert capsys.readouterr().err.count("error") == 1
    assert 3 < leaving.waited < 4
    assert leaving.codes == [2, 2]


@pytest.mark.parametrize("mark", ["none", "of an earlier launch", "of another launch"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_that_only_one_process_met_is_said_by_it(leaving, monkeypatch, capsys, tmp_path, mark, rank):
    if mark != "none":
        refuse(monkeypatch, 1 - rank)
        capsys.readouterr()
        leaving.waited = 0
        if mark == "of an earlier launch":
            (path,) = tmp_path.iterdir()
            long_ago = struct.pack("<d", psutil.Process().create_time() - 60)
            path.write_bytes(long_ago * (path.stat().st_size // 8))
        else:
            monkeypatch.setenv("MASTER_PORT", "23456")
    refuse(monkeypatch, rank)
    assert capsys.readouterr().err == "error: --seed x: give a number\n"
    assert 10 <= leaving.waited < 11
    assert leaving.codes[-1] == 2


def test_a_process_alone_does_not_wait(leaving, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    refuse(monkeypatch, 0)
    assert leaving.waited == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_launcher_that_ends_a_refusing_process_gets_its_exit_code(leaving, monkeypatch, rank):
    refuse(monkeypatch, rank)
    with pytest.raises(Left):
        leaving.handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert leaving.codes == [2, 2]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("--seed x: give a number"), 2, "error: --seed x: give a number\n"),
        (Preempted(), 143, ""),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "error: the disk is full"),
    ],
)
def test_how_a_run_ends_is_in_its_exit_code_and_in_one_line(leaving, monkeypatch, capsys, error, code, said):
    def main(_):
        raise error

    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    with pytest.raises(Left):
        command.run(main, Options)
    assert leaving.codes == [code]
    err = capsys.readouterr().err
    assert err.startswith(said)
    assert err.count("\n") == (1 if said else 0)


def test_collections_of_a_start_leave_out_what_is_imported(leaving, monkeypatch):
    frozen = []
    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    gc.unfreeze()
    command.run(lambda _: frozen.append(gc.get_freeze_count()), Options)
    assert frozen[0] > len(sys.modules)


def test_a_mistake_of_ours_keeps_its_traceback(leaving, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    for error in (ValueError("ours"), FileNotFoundError(errno.ENOENT, "ours")):

        def main(_, error=error):
            raise error

        with pytest.raises(type(error), match="ours"):
            command.run(main, Options)
    assert leaving.codes == []


def of_rank(monkeypatch, rank, what):
    """Local process `rank` says why it ends."""
    with monkeypatch.context() as there:
        there.setenv("LOCAL_RANK", str(rank))
        exit_reasons.say(what)


@pytest.mark.parametrize(
    ("what", "code", "line"),
    [
        ("preempted", 143, ""),
        ("failed", 1, "error: rank 1 on {} has ended: its output says why\n"),
        ("refused", 2, "error: rank 1 on {} has ended: its output says why\n"),
    ],
)
def test_a_process_whose_peer_ended_ends_like_it_and_names_it(leaving, monkeypatch, capsys, what, code, line):
    def main(_):
        raise RuntimeError("ours")

    monkeypatch.setattr(sys, "argv", ["recipe.py"])
    of_rank(monkeypatch, 1, what)
    with pytest.raises(Left):
        command.run(main, Options)
    assert leaving.codes == [code]
    assert capsys.readouterr().err == line.format(socket.gethostname())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # by the launcher at once: the word is hardly older than it
    with pytest.raises(RuntimeError, match="ours"):
        command.run(main, Options)


def test_a_lost_connection_is_explained_by_who_is_gone_and_otherwise_said_in_one_line(monkeypatch):
    gloo = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:24601\nframe #0")
    monkeypatch.setattr(exit_reasons, "PATIENCE", 0.1)
    monkeypatch.setattr(exit_reasons, "known", exit_reasons.Launch())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert exit_reasons.of_peer(ValueError("Connection closed by peer")) is None
    assert exit_reasons.of_peer(RuntimeError("a shape that does not fit")) is None
    peer = exit_reasons.of_peer(gloo)
    assert peer.code == 1
    assert re.fullmatch(r"the connection to another process is lost \(.*Connection closed .*\): see .*", peer.line)

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    exit_reasons.known.processes = [exit_reasons.me(), exit_reasons.me() | {"pid": dead.pid, "host": "there"}]
    peer = exit_reasons.of_peer(gloo)
    assert peer.code == 1
    assert peer.line.startswith(f"rank 1 (process {dead.pid} on there) has ended without a word: it was killed")
    exit_reasons.known.processes[1]["machine"] = "another"  # where that number is another process's
    assert exit_reasons.of_peer(gloo).line.startswith("the connection to another process is lost")

    exit_reasons.known.store = torch.distributed.HashStore()
    exit_reasons.tell_all_machines(2, "--seed x: give a number")
    assert exit_reasons.found() is None, "it was this process's own word"
    word = exit_reasons.me() | {"host": "there", "rank": 3, "code": 2, "why": "--train_file a.csv does not exist"}
    exit_reasons.known.store.set(exit_reasons.WORD, json.dumps(word))
    peer = exit_reasons.of_peer(gloo)
    assert (peer.code, peer.line) == (2, "rank 3 on there has ended: --train_file a.csv does not exist")


@pytest.mark.parametrize("code", [0, 1, 2, 143])
def test_a_process_that_was_told_to_end_says_so_to_its_peers_and_leaves_no_file(monkeypatch, tmp_path, code):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    exit_reasons.join()
    (tmp_path / "copies").mkdir()
    exit_reasons.temporary.append(tmp_path / "copies")
    ending.exit_now(code)
    assert ended == [code]
    assert exit_reasons.said(1, "preempted") == (code == 143)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert exit_reasons.peer_said("preempted") == (code == 143)
    assert not exit_reasons.peer_failed()
    assert not list(tmp_path.iterdir())


def test_freed_memory_is_kept_for_the_next_step():
    # In a process of its own: the setting stays.
    script = """
import resource, torch
from shared.launch import starting
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    before = faults()
    torch.ones(2**23).sum()  # 32 MiB, 8,192 pages
    return faults() - before
step()
fresh = step()
starting.keep_freed_memory()
print(fresh, min(step() for _ in range(5)))  # the first ones still find a place that is large enough
"""
    fresh, kept = map(int, runs.succeed([sys.executable, "-c", script]).split())
    assert fresh > 8000
    assert kept < fresh / 10


# Guards


def gpus(monkeypatch, count):
    """A machine with so many GPUs, as torch sees it."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ALONE_OF_TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("available", "environment", "flags", "message"),
    [
        (
            0,
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"},
            {},
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 4 .*remove",
        ),
        (0, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, {}, "ACCELERATE_DYNAMO_BACKEND .*use --torch_compile"),
        (
            0,
            {"NPROC": "2", "MIXED_PRECISION": "bf16"},
            {},
            r'bf16 of notebook_launcher .*Config\(mixed_precision="bf16"',
        ),
        (0, {"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "fp16 needs a GPU .*--mixed_precision no, or bf16"),
        (0, {}, {"mixed_precision": "fp16"}, "fp16 needs a GPU"),
        (1, {"ACCELERATE_MIXED_PRECISION": "fp8"}, {}, "fp8 is not supported: use --mixed_precision bf16"),
        (0, FSDP, {}, "FSDP needs a GPU .*multi_cpu.yaml"),
        (1, FSDP | {"FSDP_VERSION": "1"}, {}, "fsdp_version 1 .*set fsdp_version: 2"),
        (1, {"ACCELERATE_USE_FSDP": "true"}, {}, "fsdp_version 1"),
        (1, FSDP, {"mixed_precision": "fp16"}, "fp16 does not work under FSDP .*use bf16"),
        (1, FSDP | {"ACCELERATE_MIXED_PRECISION": "fp16"}, {}, "fp16 does not work under FSDP .*use bf16"),
        (1, FSDP, {"optim": "sgd"}, "--optim sgd does not work under FSDP.*--optim adamw, or DDP"),
        (1, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, {}, r"2 processes on a machine with 1 GPU\(s\): lower"),
        (1, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {}, r"2 processes on a machine with 1 GPU\(s\): lower"),
        (1, {"LOCAL_RANK": "1"}, {}, r"2 processes on a machine with 1 GPU\(s\): lower"),
        (0, ALONE_OF_TWO, {}, "WORLD_SIZE is 2 without LOCAL_RANK: .*torchrun"),
        (0, {"OMPI_COMM_WORLD_SIZE": "4"}, {}, "OMPI_COMM_WORLD_SIZE is 4, as mpirun and srun set it.*torchrun"),
        (1, {"SLURM_STEP_NUM_TASKS": "2"}, {}, "SLURM_STEP_NUM_TASKS is 2"),
        (0, {"WORLD_SIZE": "2"}, {}, "WORLD_SIZE is 2 without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_a_launch_that_would_train_something_else_is_refused(monkeypatch, available, environment, flags, message):
    gpus(monkeypatch, available)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        starting.start(Options(**flags))


@pytest.mark.parametrize(
    ("available", "environment", "flags"),
    [
        (0, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}, {}),
        (1, {"ACCELERATE_MIXED_PRECISION": "fp16"}, {}),
        (0, {"ACCELERATE_MIXED_PRECISION": "fp16"}, {"mixed_precision": "bf16"}),  # the flag wins
        (0, {"ACCELERATE_USE_FSDP": "false"}, {}),
        (0, {"NPROC": "2", "MIXED_PRECISION": "bf16"}, {"mixed_precision": "bf16"}),
        (0, {"MIXED_PRECISION": "bf16"}, {}),  # a user's own, for a script of theirs
        (2, FSDP | {"LOCAL_RANK": "1"}, {}),
        (0, ALONE_OF_TWO | {"LOCAL_RANK": "0"}, {}),
        (0, ALONE_OF_TWO | {"LOCAL_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"}, {}),  # told of each other by a launcher
        (0, {"SLURM_STEP_NUM_TASKS": "1"}, {}),
    ],
)
def test_a_launch_that_this_machine_can_do_passes(monkeypatch, available, environment, flags):
    gpus(monkeypatch, available)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    starting.check_environment(Options(**flags), on_cpu=available == 0)


def test_fewer_processes_than_expected_are_refused():
    with pytest.raises(UserError, match=r"--expect_processes 2, but 1 started.*torchrun --nproc-per-node"):
        starting.start(Options(expect_processes=2))


def stand_in(monkeypatch, processes, kind="NO"):
    """Accelerate reports so many processes of this kind."""
    kind = accelerate.DistributedType(kind)
    found = SimpleNamespace(num_processes=processes, distributed_type=kind, state=SimpleNamespace())
    monkeypatch.setattr(accelerate, "Accelerator", lambda **_: found)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Options(output_dir=""), "--output_dir '' would be the working folder"),
        (Options(global_batch_size=0), "--global_batch_size 0: must be at least 1"),  # as a notebook could give it
    ],
)
def test_settings_are_checked_wherever_a_run_is_started(config, message):
    with pytest.raises(UserError, match=message):
        starting.start(config)


def test_processes_that_each_believe_they_are_alone_are_refused(monkeypatch):
    for name, value in (ALONE_OF_TWO | {"LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    stand_in(monkeypatch, processes=1)
    with pytest.raises(UserError, match="WORLD_SIZE says 2 processes, Accelerate says 1: each would train alone"):
        starting.start(Options())


def test_an_engine_that_the_loop_is_not_made_for_is_refused(monkeypatch):
    stand_in(monkeypatch, processes=1, kind="DEEPSPEED")
    with pytest.raises(UserError, match=r"distributed_type DEEPSPEED is not supported.*fsdp\.yaml"):
        starting.start(Options())


# What processes share


@pytest.mark.parametrize(
    ("environment", "cores", "threads"),
    [
        ({}, 8, 8),
        ({"OMP_NUM_THREADS": "3"}, 8, 3),
        ({"OMP_NUM_THREADS": "4,2"}, 8, 4),
        ({"OMP_NUM_THREADS": "many"}, 8, 8),
        ({"OMP_NUM_THREADS": "1"}, 8, 1),
        ({"LOCAL_WORLD_SIZE": "3"}, 8, 2),
        ({"LOCAL_WORLD_SIZE": "4"}, 2, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}, 8, 4),  # torchrun's own 1
        ({"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no"}, 8, 8),  # accelerate's
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x", "LOCAL_WORLD_SIZE": "2"}, 8, 2),
    ],
)
def test_the_cores_of_a_machine_are_shared_out_unless_the_user_said_otherwise(monkeypatch, environment, cores, threads):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert starting.threads_per_process() == threads


def test_a_launcher_s_variable_that_is_no_number_is_refused_and_forgotten(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UserError, match="WORLD_SIZE=two: expected a number"):
        command.require_numbers()
    command.require_numbers()


@pytest.mark.parametrize(("restarts", "machines", "apart"), [("0", "1", False), ("2", "1", True), ("2", "3", False)])
def test_restarted_processes_of_one_machine_look_for_each_other_apart(monkeypatch, restarts, machines, apart):
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"TORCHELASTIC_RESTART_COUNT": restarts, "GROUP_WORLD_SIZE": machines}
    for name, value in (environment | {"MASTER_PORT": str(runs.free_port())}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(exit_reasons, "known", exit_reasons.Launch())
    method = agreement.init_method(Options(), "cpu")
    store, rank, processes = next(torch.distributed.rendezvous(method, 0, 1, timeout=timedelta(seconds=20)))
    assert (rank, processes) == (0, 1)
    store.set("address", "mine")
    inner = store.underlying_store if apart else store
    assert inner.check(["restart-2/address" if apart else "address"])


def test_a_port_in_use_ends_a_launch_of_shells_in_one_line(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in (ALONE_OF_TWO | {"LOCAL_RANK": "0", "MASTER_PORT": str(port)}).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=rf"port {port} is in use on \S+ by process {os.getpid()} "):
            starting.start(Options())


def test_dropout_depends_on_seed_step_and_micro_batch_and_on_nothing_before():
    def draw(*words):
        seeding.seed_dropout(torch.device("cpu"), *words)
        return torch.rand(3).tolist()

    first = draw(0, 1, 2)
    others = [draw(1, 1, 2), draw(0, 2, 2), draw(0, 1, 3), draw(0, 2, 1)]
    assert first not in others
    assert draw(0, 1, 2) == first


def test_every_process_raises_the_error_of_the_lowest_rank_that_met_one(monkeypatch):
    def gather(messages, mine):
        messages[:] = [None, mine, "of rank 2"]

    monkeypatch.setattr(patience, "for_all", lambda _: None)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    three = SimpleNamespace(num_processes=3)
    with pytest.raises(UserError, match="of rank 2"):
        collectives.agree(three, None)
    with pytest.raises(UserError, match="of rank 1"):
        collectives.agree(three, UserError("of rank 1"))


def test_one_process_agrees_with_itself():
    alone = SimpleNamespace(num_processes=1)
    collectives.agree(alone, None)
    with pytest.raises(UserError, match="mine"):
        collectives.agree(alone, UserError("mine"))


@pytest.mark.parametrize("main", [True, False])
def test_what_the_main_process_finds_every_process_gets(monkeypatch, main):
    sent = []
    two = SimpleNamespace(num_processes=2, is_main_process=main)

    def broadcast(outcome):
        if main:
            sent.append(list(outcome))
        else:
            outcome[:] = sent[-1]

    def fail():
        raise UserError("found by one")

    def never():
        raise AssertionError("called on a process that is not the main one")

    monkeypatch.setattr(patience, "for_all", lambda _: None)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    sent.append([7, None])
    assert collectives.on_main_process(two, (lambda: 7) if main else never) == 7
    assert sent[-1] == [7, None]
    sent.append([None, "found by one"])
    with pytest.raises(UserError, match="found by one"):
        collectives.on_main_process(two, fail if main else never)
    assert sent[-1] == [None, "found by one"]
