"""Start recipes as users start them, and read their outputs."""

import ast
import contextlib
import csv
import gc
import importlib.util
import json
import multiprocessing
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fork_server
import psutil
import torch
from safetensors.torch import load_file

from shared.config import options
from shared.errors import UserError
from shared.extras import flops

# A run on a CPU measures its peak by products of matrices. In the hundreds of runs of the tests, small ones are enough.
flops.SIDES["cpu"] = (64,)

ROOT = Path(__file__).parent.parent
FILES = {"config.yaml", "launch_card.txt", "metrics.jsonl", "report.html", "checkpoints", "model"}  # of every recipe
BIN = Path(sys.executable).parent
# Flags of a model that trains in seconds; tests append their own flags.
TINY = [
    *("--hidden_size", "32", "--num_hidden_layers", "2", "--num_attention_heads", "2", "--vocab_size", "400"),
    *("--max_length", "48", "--max_tokens_per_micro_batch", "96", "--global_batch_size", "12"),
    *("--max_train_steps", "8", "--logging_steps", "2", "--eval_steps", "8"),
]
FSDP = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
FSDP |= {"FSDP_RESHARD_AFTER_FORWARD": "true"}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}  # as in TINY
# The same for images. A step has four micro-batches, so three processes have unequal shares.
TINY_IMAGES = [
    *("--embedding_size", "8", "--hidden_sizes", "8", "16", "--image_size", "16", "--global_batch_size", "48"),
    *("--per_device_train_batch_size", "12", "--max_train_steps", "8", "--logging_steps", "2", "--eval_steps", "8"),
]


def environment_of_a_user(**changes):
    """The environment of a new process: without the variables that this process has set, and offline."""
    ours = ("ACCELERATE_", "WANDB_", "OMP_", "THP_", "MALLOC_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {"PYTHONPATH": packages_path(), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONUNBUFFERED": "1"}
    env |= changes
    if cache := os.environ.get("ACCELERATE_RECIPES_CACHE"):
        env.setdefault("ACCELERATE_RECIPES_CACHE", cache)
    return env


def packages_path():
    """PYTHONPATH without this repository: it may lead to packages, but the recipes must find `shared` without it."""
    folders = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(folder for folder in folders if Path(folder).resolve() != ROOT)


def start(command, folder=ROOT, output=subprocess.PIPE, **environment):
    """Start a process in its own session, so that `end` can kill it with all its children; `output` may be a file."""
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=environment_of_a_user(**environment),
        stdout=output,
        stderr=output,
        text=True,
        start_new_session=True,
    )


def fork(function, args, processes, timeout=240):
    """Call `function(rank, *args)` in `processes` processes, forked from one that has already imported slow packages.

    An error in a process is raised here. A fork takes milliseconds; importing in each process would take seconds.
    """
    wait(begin_fork(function, args, processes), timeout)


def begin_fork(function, args, processes):
    """Start the processes of `fork` without waiting; return their context, for `wait`."""
    fork_server.ensure_running(environment_of_a_user(OMP_NUM_THREADS="1"))
    return torch.multiprocessing.start_processes(function, args, processes, join=False, start_method="forkserver")


def wait(context, timeout=240):
    """Wait for the processes of `begin_fork`; an error in one of them is raised here."""
    deadline = time.monotonic() + timeout
    try:
        while not context.join(timeout=max(0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"{len(context.processes)} processes have not ended in {timeout} s"
    finally:
        kill(context)


def kill(context):
    """Kill the processes of `begin_fork` that have not ended."""
    for process in context.processes:
        process.kill()
    for process in context.processes:
        process.join()


def run(command, folder=ROOT, timeout=240, **environment):
    """Run a command to its end and return its output; in any case kill all processes that it started."""
    process = start(command, folder, **environment)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end(process):
    """Kill a process and all its children. Children of torchrun have sessions of their own, and save when it dies."""
    started = []
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(started)
    process.wait()


def wait_for_steps(process, output, steps):
    """Wait until metrics.jsonl of the run of a process has this many lines."""
    deadline = time.monotonic() + 200
    while not (output / "metrics.jsonl").exists() or len(metrics(output)) < steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no {steps} lines in 200 s"
        time.sleep(0.02)


def power_off(process):
    """Kill a process and all its children at the same moment, like a power failure."""
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        found = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in found:
            each.suspend()  # no process may notice the end of another one
        for each in found:
            each.send_signal(signal.SIGKILL)
    process.wait()


def succeed(command, **kwargs):
    """Run a command, check that it succeeds, and return its output."""
    done = run(command, **kwargs)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout + done.stderr


def truncate(file):
    file.write_bytes(file.read_bytes()[:-10])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forbid_preparing(monkeypatch):
    """Let each build of a folder of the cache fail: everything has been prepared."""
    from shared.cache import prepared

    mkdtemp = mock.Mock(side_effect=AssertionError("data were prepared again"))
    monkeypatch.setattr(prepared, "tempfile", SimpleNamespace(mkdtemp=mkdtemp))


def free_port():
    """A port on which nobody listens, outside the range (32768 and more) from which outgoing connections get theirs.

    A port of that range is often taken before the process that gets its number listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)  # workers of pytest may have equal seeds
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port


def torchrun(processes, *script):
    words = ["--nproc-per-node", processes, "--master-port", free_port()]
    return [sys.executable, "-m", "torch.distributed.run", *words, *script]


def accelerate_launch(config, *script, flags=()):
    file, port = ROOT / f"accelerate_configs/{config}.yaml", free_port()
    words = ["launch", "--config_file", file, "--main_process_port", port, *flags, *script]
    return [sys.executable, "-m", "accelerate.commands.accelerate_cli", *words]


def run_many(processes, configs, folder, recipe="recipes/nlp.py", modes=None, **environment):
    """Call a recipe's `main` with each config in turn, in one launch; return {name: output folder}.

    `modes` maps names to modes of call_recipe.py; the default is to train. The output of the launch is written to
    output-PROCESSES.txt; `environment` has further environment variables.
    """
    context = begin_many(processes, configs, folder, recipe, modes, **environment)
    try:
        wait(context)
    except Exception as error:
        raise AssertionError((folder / f"output-{processes}.txt").read_text()[-8000:]) from error
    return {name: folder / f"{name}-{processes}" for name in configs}


def begin_many(processes, configs, folder, recipe="recipes/nlp.py", modes=None, **changes):
    """Start the processes of `run_many`; return their context, for `wait`. `changes` are environment variables."""
    jobs, log = folder / f"jobs-{processes}.json", folder / f"output-{processes}.txt"
    every = ["--expect_processes", str(processes), "--output_dir"]
    flags = {name: [*map(str, config), *every, str(folder / f"{name}-{processes}")] for name, config in configs.items()}
    jobs.write_text(json.dumps([{"flags": flags[n], "mode": (modes or {}).get(n, "train")} for n in configs]))
    environment = environment_of_a_user(OMP_NUM_THREADS="1") | in_one_launch(processes)
    words = [str(ROOT / "tests/call_recipe.py"), str(ROOT / recipe), str(jobs)]
    return begin_fork(_run_script, (words, log, environment | changes), processes)


def run_forked(processes, script, flags, folder, timeout=240, begun=lambda processes: None, **changes):
    """Run a script in forked processes of one launch, as `torchrun` would; return (exit codes by rank, their output).

    Prefer it to `run`, except in a test of the launcher itself: forked processes have the slow packages already.
    curves.png is not drawn, because drawing takes as long as the rest of a tiny run. `begun` gets the processes.
    """
    log = folder / f"forked-{time.monotonic_ns()}.txt"
    environment = environment_of_a_user(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="") | in_one_launch(processes)
    words = [str(word) for word in (ROOT / script, *flags)]
    context = begin_fork(_run_script, (words, log, environment | changes), processes)
    begun(context.processes)
    deadline = time.monotonic() + timeout
    try:
        for process in context.processes:
            process.join(deadline - time.monotonic())
    finally:
        kill(context)
    return [process.exitcode for process in context.processes], log.read_text()


def in_one_launch(processes):
    """The environment variables that a launcher sets for all processes of one machine; none for a single process."""
    if processes == 1:
        return {}
    numbers = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return numbers | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def _run_script(rank, words, log, environment):
    if "WORLD_SIZE" in environment:
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.clear()
    os.environ.update(environment)
    os.setsid()
    os.chdir(ROOT)
    multiprocessing.set_start_method("fork", force=True)  # Python's own default, which the fork server has replaced
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from shared.report import page

    page.draw_curves = lambda *_: None  # tests/extras/test_curves.py tests it
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def train(recipe, output, *flags, picture=False):
    """Train with a recipe, a module or its name, in this process on one CPU; return the results of its `main`."""
    import pytest

    from shared.report import page

    module = load_recipe(recipe) if isinstance(recipe, str) else recipe
    config = options.parse(module.Config, [*map(str, flags), "--output_dir", str(output)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("OMP_NUM_THREADS", "1")
        if not picture:
            patch.setattr(page, "draw_curves", lambda *_: None)
        return module.main(config)


def refusal(function, *arguments, **more):
    """The message of the UserError that a call raises, which is one line."""
    from shared.processes import folder_lock

    message = problem_of(function, *arguments, **more)
    folder_lock.release_all()  # as the end of the process would
    assert message is not None
    assert "\n" not in message
    assert len(message) < 600
    return message


class Killed(Exception):
    """Ends a run in this process, as a kill would."""


def train_until(step, recipe, output, *flags):
    """As `train`, killed once the checkpoint of `step` is complete; None: before the run's first checkpoint."""
    import pytest

    from shared.checkpoints.saving import Saver
    from shared.processes import folder_lock

    save = Saver.save

    def save_and_die(saver, progress, monitored):
        if step is not None:
            save(saver, progress, monitored)
        if step == progress.step:
            saver.finish()
        if step in (None, progress.step):
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "save", save_and_die)
        with pytest.raises(Killed):
            train(recipe, output, *flags)
    folder_lock.release_all()


def problem_of(function, *arguments, **more):
    """The message of the UserError that a call raises; None if it raises none."""
    try:
        function(*arguments, **more)
    except UserError as error:
        return str(error)
    return None


def load_recipe(name):
    """Import a recipe as a module into this process, to compute expected results with its functions."""
    return load(ROOT / f"recipes/{name}.py")


def prepared(recipe, flags):
    """The config of a command line, and what the recipe, a module or its name, loads by it."""
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    config = options.parse(recipe.Config, list(map(str, flags)))
    return config, *recipe.load_data(config)


def load(file):
    """Import a file as a module into this process."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def in_group(function, processes, folder, machines=False):
    """Call `function(accelerator, folder)` on each process of a gloo group; return the results, converted by JSON.

    With `machines`, the environment tells each process that it is the only one on its machine.
    """
    (folder / "store").unlink(missing_ok=True)
    fork(_join, (function, processes, folder, machines, dict(os.environ)), processes)
    return [json.loads((folder / f"returned-{rank}.json").read_text()) for rank in range(processes)]


def _join(rank, function, processes, folder, machines, environment):
    from accelerate import Accelerator

    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0" if machines else str(rank), "WORLD_SIZE": str(processes)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}  # Accelerate requires them; a file is used instead
    store = f"file://{folder / 'store'}"
    timeout = timedelta(seconds=60)  # processes in different collectives fail instead of hanging
    torch.distributed.init_process_group("gloo", timeout=timeout, init_method=store, rank=rank, world_size=processes)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == processes
    (folder / f"returned-{rank}.json").write_text(json.dumps(function(accelerator, folder)))
    gc.collect()  # a DDP model that is alive when gloo's threads end aborts the process
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def metrics(output):
    return [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]


def training_lines(output):
    return [line for line in metrics(output) if "loss" in line]


def losses(output):
    """The losses of the logged training steps."""
    return [line["loss"] for line in training_lines(output)]


def evaluation(output):
    """The last evaluation of a run."""
    return [line for line in metrics(output) if "eval_loss" in line][-1]


def exported(output):
    """The exported weights as bytes."""
    return (Path(output) / "model/model.safetensors").read_bytes()


def weights(output, without=None):
    """The exported weights as one float64 vector, except tensors with the pattern `without` in their names."""
    tensors = load_file(Path(output) / "model/model.safetensors")
    names = [name for name in sorted(tensors) if without is None or not re.search(without, name)]
    return torch.cat([tensors[name].flatten().double() for name in names])


def weights_that_learn(output):
    """The weights except the biases of attention keys: their gradient is rounding noise, which Adam scales up."""
    return weights(output, without=r"(key|k_lin|k_proj)\.bias$")


def distance(a, b):
    """The norm of the difference of two vectors, relative to the norm of the second."""
    return ((a - b).norm() / b.norm()).item()


def files(folder):
    """{path: (digest, time of the last change)} of every file in a folder."""
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder): (sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) for path in found}


def write_clone(folder):
    """Make a folder with links to the files of the repository, into which commands may write; return it."""
    folder.mkdir(exist_ok=True)
    for path in ROOT.iterdir():
        if path.name not in ("out", ".git", ".venv", "wandb"):
            (folder / path.name).symlink_to(path)
    return folder


def write_rows(path, *lines):
    """Write pairs of a text and its label to a CSV file; return its path."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *lines])
    return path


def write_texts(folder, rows=160, validation_rows=37):
    """Write train.csv and valid.csv with sentences from docstrings of the standard library; return their flags."""
    found = []
    library = Path(sysconfig.get_paths()["stdlib"])
    for label in ("asyncio", "email", "unittest", "xml"):
        sentences = []
        for file in sorted((library / label).rglob("*.py")):
            if len(sentences) * 4 >= rows + validation_rows:  # parsing all files takes seconds
                break
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    sentence = " ".join(text.split())[:300]
                    sentences += [(sentence, label)] * (len(sentence) > 20)
        found.append(sentences)
    mixed = [row for group in zip(*found, strict=False) for row in group][: rows + validation_rows]
    assert len(mixed) == rows + validation_rows
    for name, part in (("train.csv", mixed[:rows]), ("valid.csv", mixed[rows:])):
        write_rows(folder / name, *part)
    return ["--train_file", folder / "train.csv", "--validation_file", folder / "valid.csv"]


def write_bert_with_dropout(folder, texts):
    """Write a BERT with random weights and dropout 0.1, and the tokenizer of the tiny runs, to `folder`."""
    from transformers import BertConfig, BertForSequenceClassification

    *_, labels, tokenizer = prepared("nlp", [*texts, *TINY])
    torch.manual_seed(0)
    head = {"num_labels": labels.num_labels, "initializer_range": 0.5}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), **SIZES, **head))
    assert model.config.hidden_dropout_prob == model.config.attention_probs_dropout_prob == 0.1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
